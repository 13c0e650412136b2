"""Copies of a model are loaded once per process, and lent to one thread at a time."""

import concurrent.futures
import pathlib
import threading

import pytest

from calm_beam.outputs import worker
from calm_beam.outputs.request import Assignment
from calm_beam.transforms.decode import ModelCopies
from tests.pipelines import TEXTUAL, id_rows, run_calibration, split_rows, write_model

_THREADS = 6


class _Copy:
    """A model that records whether two threads ever used it at once."""

    def __init__(self) -> None:
        self.users = 0
        self.most_users = 0


def _use(copies: ModelCopies[_Copy], barrier: threading.Barrier) -> None:
    barrier.wait()
    for _ in range(50):
        with copies.borrowed() as copy:
            copy.users += 1
            copy.most_users = max(copy.most_users, copy.users)
            threading.Event().wait(0.0005)
            copy.users -= 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("most", [1, 2, 20])
def test_a_copy_has_one_user(most: int) -> None:
    """With any number of threads, each copy serves one, and no more are loaded than allowed or needed."""
    loaded: list[_Copy] = []

    def load() -> _Copy:
        loaded.append(_Copy())
        return loaded[-1]

    copies = ModelCopies(load, most=most)
    assert len(loaded) == 1
    barrier = threading.Barrier(_THREADS)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        for future in [threads.submit(_use, copies, barrier) for _ in range(_THREADS)]:
            future.result()
    assert 1 <= len(loaded) <= min(most, _THREADS)
    assert {copy.most_users for copy in loaded} == {1}


def test_second_copies_wait_for_a_second_thread() -> None:
    """A returned copy is lent again; another is loaded only while all are lent."""
    names = iter("abc")
    copies = ModelCopies(lambda: next(names), most=3)
    for _ in range(2):
        with copies.borrowed() as copy:
            assert copy == "a"
    with copies.borrowed() as first, copies.borrowed() as second:
        assert (first, second) == ("a", "b")


def test_a_copy_comes_back_after_an_error() -> None:
    """Failing work returns its copy, and a failing load frees its place."""
    attempts = iter(["a", None, "b"])

    def load() -> str:
        name = next(attempts)
        if name is None:
            raise MemoryError("no room")
        return name

    copies = ModelCopies(load, most=2)
    with pytest.raises(KeyError), copies.borrowed():
        raise KeyError
    with copies.borrowed() as first:
        with pytest.raises(MemoryError), copies.borrowed():
            pass
        with copies.borrowed() as second:
            assert (first, second) == ("a", "b")


def test_load_times_are_told_once() -> None:
    """Each load is reported once, to the first caller that asks."""
    copies = ModelCopies(object, most=2)
    assert len(copies.take_load_msecs()) == 1
    assert copies.take_load_msecs() == []
    with copies.borrowed(), copies.borrowed():
        pass
    assert len(copies.take_load_msecs()) == 1


@pytest.mark.timeout(200)
def test_threads_of_a_process_share_the_model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers in threads load the model once, and give the result of one worker."""
    load, log = worker.load_model, tmp_path / "loads"

    def counted_load(assignment: Assignment) -> object:
        with open(log, "a", encoding="utf-8") as file:
            file.write("loaded\n")
        return load(assignment)

    monkeypatch.setattr(worker, "load_model", counted_load)
    model = write_model(tmp_path / "model")
    paths = split_rows(tmp_path / "data", id_rows(12), files=3)
    threads = ("--direct_num_workers=3", "--direct_running_mode=multi_threading")
    run_calibration(tmp_path / "three", model=model, paths=paths, specs=TEXTUAL, num_shards=6, options=threads)
    assert log.read_text() == "loaded\n"
    run_calibration(tmp_path / "one", model=model, paths=paths, specs=TEXTUAL)
    tables = [(tmp_path / name / "risk_table.csv").read_bytes() for name in ("one", "three")]
    assert tables[0] == tables[1]
