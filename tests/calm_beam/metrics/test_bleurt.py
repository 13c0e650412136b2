"""BLEURT with small random checkpoints in the published layout."""

import concurrent.futures
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from calm_beam.metrics import MetricSettings
from calm_beam.metrics.bleurt import Bleurt, BleurtConfig, BleurtError, Encoder, checkpoint_fingerprint, word_ids, words
from calm_beam.metrics.registry import MetricError, checked_score, full_name, get_metric, take_clipped
from tests.bleurt_builder import WORD_PIECES, write_bleurt
from tests.sampling import sampled

_TEXTS = ("", "the cat sat on the mat", "a dog", "the cats sat.", "a dog, the cat " * 5, "unable " * 40, "zzz", "日本")
_KINDS = {
    "uncased": {},
    "cased": {"do_lower_case": False},
    "sentencepiece": {"is_sentencepiece": True},
    "one length": {"takes_any_length": False},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """A checkpoint of each kind."""
    root = tmp_path_factory.mktemp("bleurt")
    return {kind: write_bleurt(root / str(place), **options) for place, (kind, options) in enumerate(_KINDS.items())}  # type: ignore[arg-type]


@pytest.fixture
def copied(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """Gives a copy of a checkpoint for a test to damage."""

    def copy(kind: str) -> pathlib.Path:
        return pathlib.Path(shutil.copytree(folders[kind], tmp_path / "copy"))

    return copy


def _direct(folder: pathlib.Path, ids: Sequence[int], segments: Sequence[int], length: int) -> float:
    """Returns the prediction of TensorFlow's own loader for ids, padded to a length."""
    predict = tf.saved_model.load(str(folder)).signatures["serving_default"]
    padding = [0] * (length - len(ids))
    arrays = {
        "input_ids": [[*ids, *padding]],
        "input_mask": [[1] * len(ids) + padding],
        "segment_ids": [[*segments, *padding]],
    }
    inputs = {name: tf.constant(array, tf.int64) for name, array in arrays.items()}
    return float(predict(**inputs)["predictions"][0])


@pytest.mark.parametrize("kind", sampled(["uncased", "sentencepiece", "one length"], keep=(0,)))
def test_scores_equal_a_direct_forward_pass(kind: str, folders: dict[str, pathlib.Path]) -> None:
    """A score is the SavedModel's for the pair's ids, at their padded length, to the last bit."""
    folder = folders[kind]
    bleurt, encoder = Bleurt(folder), Encoder.of(BleurtConfig.read(folder))
    pairs = list(itertools.product(_TEXTS[1:6], _TEXTS[:4]))
    scores = []
    for reference, candidate in pairs:
        ids, segments = encoder.encode(reference=reference, candidate=candidate)
        length = 64 if kind == "one length" or len(ids) > 32 else 32
        scores.append(_direct(folder, ids, segments, length))
        assert bleurt.score(reference=reference, candidate=candidate) == scores[-1]
    assert len(set(scores)) > len(pairs) // 2


def test_what_is_scored_beside_it_and_when_changes_no_bit(folders: dict[str, pathlib.Path]) -> None:
    """Order, threads, other texts and another instance change no bit of a score."""
    pairs = [(left, right) for left, right in itertools.product(_TEXTS, _TEXTS) if left != right]
    bleurt = Bleurt(folders["uncased"])
    expected = {pair: bleurt(pair[0], [pair[1]]) for pair in pairs}
    other = Bleurt(folders["uncased"])
    shuffled = [pairs[index] for index in np.random.default_rng(3).permutation(len(pairs))]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = dict(zip(shuffled, pool.map(lambda pair: other(pair[0], [pair[1]]), shuffled), strict=True))
    assert found == expected
    some = pairs[:6]
    best = max(expected[("a dog", reference)] for _, reference in some if ("a dog", reference) in expected)
    assert bleurt("a dog", [reference for _, reference in some if reference != "a dog"]) == best


def test_ids_of_word_pieces(folders: dict[str, pathlib.Path]) -> None:
    """Ids are [CLS] reference [SEP] candidate [SEP], words in pieces, unknown ones as one, in two segments."""
    encoder = Encoder.of(BleurtConfig.read(folders["uncased"]))
    ids, segments = encoder.encode(reference="The UNABLE cat's, L'ÉTÉ", candidate="日本 zzz")
    pieces = "[CLS] the un ##able cat ' [UNK] , l ' ete [SEP] 日 本 [UNK] [SEP]"
    assert [WORD_PIECES[index] for index in ids] == pieces.split()
    assert segments == [0] * 12 + [1] * 4
    cased = Encoder.of(BleurtConfig.read(folders["cased"]))
    ids, _ = cased.encode(reference="the The", candidate="Été straße")
    assert [WORD_PIECES[index] for index in ids] == ["[CLS]", "the", "[UNK]", "[SEP]", "Été", "straße", "[SEP]"]
    ids, _ = encoder.encode(reference="STRASSE straße", candidate="[SEP]")
    assert [WORD_PIECES[index] for index in ids] == ["[CLS]", "[UNK]", "straße", "[SEP]", *["[UNK]"] * 3, "[SEP]"]


def test_ids_of_sentencepiece(folders: dict[str, pathlib.Path]) -> None:
    """The ids are those of the SentencePiece model, between its own [CLS] and [SEP]."""
    folder = folders["sentencepiece"]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sent_piece.model"))
    first, second = processor.piece_to_id("[CLS]"), processor.piece_to_id("[SEP]")
    ids, segments = Encoder.of(BleurtConfig.read(folder)).encode(reference="the Cat", candidate="été")
    reference, candidate = processor.encode("the Cat"), processor.encode("été")
    assert ids == [first, *reference, second, *candidate, second]
    assert segments == [0] * (len(reference) + 2) + [1] * (len(candidate) + 1)


@pytest.mark.parametrize("kind", ["uncased", "sentencepiece"])
def test_texts_that_the_vocabulary_does_not_know_are_not_seen(kind: str, folders: dict[str, pathlib.Path]) -> None:
    """Different texts of unknown pieces score 0, whatever the model gives; known pieces are scored by the model."""
    bleurt = Bleurt(folders[kind])
    assert not bleurt.sight.sees("жук")
    assert not bleurt.sight.sees("")
    assert bleurt("жук", ["щи"]) == bleurt("щи", ["жук"]) == bleurt("", ["жук"]) == 0
    assert bleurt("жук", [" жук\n"]) == 1
    assert bleurt.sight.drops_letters("the жуки")
    assert not bleurt.sight.drops_letters("the cat")
    assert bleurt("жук", ["the cat"]) == min(max(bleurt.score(reference="the cat", candidate="жук"), 0.0), 1.0)


@pytest.mark.parametrize(
    ("reference", "candidate", "kept"),
    [(3, 2, (3, 2)), (8, 1, (4, 1)), (1, 8, (1, 4)), (9, 9, (3, 2)), (3, 4, (3, 2)), (5, 0, (5, 0)), (0, 7, (0, 5))],
)
def test_the_longer_side_is_trimmed(reference: int, candidate: int, kept: tuple[int, int]) -> None:
    """Ids are removed from the end of the longer text, or of the candidate if both are as long."""
    encoder = Encoder(
        tokenize=lambda text: list(range(10, 10 + int(text))), known=str.split, cls_id=1, sep_id=2, max_length=8
    )
    ids, segments = encoder.encode(reference=str(reference), candidate=str(candidate))
    assert ids == [1, *range(10, 10 + kept[0]), 2, *range(10, 10 + kept[1]), 2]
    assert len(ids) == len(segments) <= 8


@pytest.mark.parametrize(
    ("text", "cased", "uncased"),
    [
        ("A\u00a0b\x00c\u200bÉ\r\n\ufffdß\u2003ΑΣ", "A bcÉ ß ΑΣ", "a bce ß ας"),
        ("one\u2028two\u2029three\x85four", "one two threefour", "one two threefour"),
        ("5$+x=`y~|^<z>", "5 $ + x = ` y ~ | ^ < z >", "5 $ + x = ` y ~ | ^ < z >"),
        ("«l’été»—Ça…", "« l ’ été » — Ça …", "« l ’ ete » — ca …"),
        ("日本ばU\U00020000\uf900", "日 本 ばU \U00020000 \uf900", "日 本 はu \U00020000 豈"),
        ("a\u037eb \u1fef", "a \u037e b \u1fef", "a ; b `"),
        ("[SEP] ##s", "[ SEP ] # # s", "[ sep ] # # s"),
        (" \u2028\t", "", ""),
    ],
)
def test_words(text: str, cased: str, uncased: str) -> None:
    """Words are split as by BERT's own tokenizer, whose results for these texts are stored."""
    assert " ".join(words(text, lower_case=False)) == cased
    assert " ".join(words(text, lower_case=True)) == uncased


@pytest.mark.parametrize("letter", ["a", "é", "日", "𐐷"])
def test_words_of_more_than_200_characters_are_unknown(letter: str) -> None:
    """Characters count, however many bytes they have."""
    ids = {"[UNK]": 0, letter: 1, f"##{letter}": 2, f"##{letter * 3}": 3}
    assert word_ids(letter * 200, ids) == [1, *[3] * 66, 2]
    assert word_ids(letter * 201, ids) == [0]


def test_scores_outside_are_clipped_and_counted(tmp_path: pathlib.Path) -> None:
    """A score outside [0, 1] is clipped and counted once each time; equal texts score 1 without the model."""
    bleurt = Bleurt(write_bleurt(tmp_path / "wide", spread=3.0))
    raw = {text: bleurt.score(reference="the cat", candidate=text) for text in _TEXTS}
    assert min(raw.values()) < 0 or max(raw.values()) > 1
    clipped = {text: bleurt(text, ["the cat"]) for text in _TEXTS}
    assert clipped == {text: min(max(score, 0.0), 1.0) for text, score in raw.items()}
    assert take_clipped(bleurt) == sum(not 0 <= score <= 1 for score in raw.values())
    assert take_clipped(bleurt) == 0
    assert [bleurt(text, [text]) for text in _TEXTS] == [1.0] * len(_TEXTS)


def test_nan_is_refused_by_name(copied: Callable[[str], pathlib.Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is refused by name, and not hidden by clipping."""
    bleurt = Bleurt(copied("uncased"))
    monkeypatch.setattr(bleurt, "_predict", lambda ids, segments: float("nan"))
    with pytest.raises(MetricError, match=r'metric "bleurt" on example "7": returned nan, expected'):
        checked_score(bleurt, "bleurt", candidate="a", references=["b"], example_id="7")


def test_the_name_holds_the_checkpoint(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """`bleurt` becomes a name of this checkpoint alone, which a copy of it has, too."""
    settings = MetricSettings(bleurt_checkpoint=str(folders["uncased"]))
    name = full_name("bleurt", settings)
    assert re.fullmatch("bleurt@[0-9a-f]{16}", name)
    assert checkpoint_fingerprint(folders["uncased"]).startswith(name.removeprefix("bleurt@"))
    copy = MetricSettings(bleurt_checkpoint=str(shutil.copytree(folders["uncased"], tmp_path / "copy")))
    assert full_name("bleurt", copy) == name
    assert get_metric(name, copy)("a dog", ["a cat"]) == get_metric("bleurt", settings)("a dog", ["a cat"])
    other = MetricSettings(bleurt_checkpoint=str(folders["cased"]))
    with pytest.raises(ValueError, match=rf'metric "{name}": the checkpoint .* is bleurt@.* are not comparable\.'):
        get_metric(name, other)
    with pytest.raises(ValueError, match=r'metric "bleurt" needs a checkpoint, .* pass --bleurt_checkpoint'):
        get_metric("bleurt")


_NAMES = ("bleurt_config.json", "bert_config.json", "vocab.txt", "saved_model.pb", "variables/variables.index")


@pytest.mark.parametrize("name", _NAMES)
def test_missing_files(name: str, copied: Callable[[str], pathlib.Path]) -> None:
    """A checkpoint without one of its files is refused with the file's name."""
    folder = copied("uncased")
    (folder / name).unlink()
    with pytest.raises(BleurtError, match=re.escape(f"BLEURT checkpoint {folder}: has no {name}.")):
        Bleurt(folder)


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("uncased", "bleurt_config.json", b"{", "bleurt_config.json cannot be read ("),
        ("uncased", "bleurt_config.json", b"[]", "bleurt_config.json is not a JSON object."),
        ("uncased", "bleurt_config.json", b"{}", "bleurt_config.json has max_seq_length None, expected an integer."),
        ("uncased", "vocab.txt", b"[CLS]\n[SEP]\n[UNK]\n", f"vocab.txt has 3 pieces, its model {len(WORD_PIECES)}."),
        ("uncased", "vocab.txt", b"a\n" * len(WORD_PIECES), f"vocab.txt has {len(WORD_PIECES) - 1} pieces twice."),
        ("uncased", "vocab.txt", "\n".join(map(str, range(len(WORD_PIECES)))).encode(), "vocab.txt has no [UNK]."),
        ("uncased", "vocab.txt", b"\xff\n", "vocab.txt is not UTF-8 ("),
        ("uncased", "saved_model.pb", b"no model", "TensorFlow cannot load it ("),
        ("uncased", "variables/variables.index", b"", "TensorFlow cannot load it ("),
        ("sentencepiece", "sent_piece.model", b"no model", "sent_piece.model is not a SentencePiece model ("),
        ("sentencepiece", "bert_config.json", b'{"vocab_size": 40}', "sent_piece.model has 48 pieces, its model 40."),
    ],
)
def test_damaged_files(
    kind: str, name: str, content: bytes, message: str, copied: Callable[[str], pathlib.Path]
) -> None:
    """A checkpoint with an invalid file is refused with a clear message."""
    folder = copied(kind)
    (folder / name).write_bytes(content)
    with pytest.raises(BleurtError, match=re.escape(f"BLEURT checkpoint {folder}: {message}")):
        Bleurt(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "scores"}, "and gives scores; BLEURT takes input_ids, input_mask, segment_ids, int64"),
        ({"dtype": tf.int32}, "its model takes input_ids int32[None, None], input_mask int32[None, None], segment_ids"),
    ],
)
def test_other_models_are_refused(options: dict[str, object], message: str, tmp_path: pathlib.Path) -> None:
    """A SavedModel with another signature is no BLEURT."""
    with pytest.raises(BleurtError, match=re.escape(message)):
        Bleurt(write_bleurt(tmp_path / "other", **options))  # type: ignore[arg-type]


def test_a_length_that_does_not_fit(copied: Callable[[str], pathlib.Path]) -> None:
    """A model and a configuration with different lengths are refused."""
    folder = copied("one length")
    config = json.loads((folder / "bleurt_config.json").read_text())
    (folder / "bleurt_config.json").write_text(json.dumps({**config, "max_seq_length": 128}))
    with pytest.raises(BleurtError, match=r"its model takes 64 tokens, bleurt_config\.json says max_seq_length 128\."):
        Bleurt(folder)


def test_a_folder_that_is_not_there() -> None:
    """A missing checkpoint is reported as missing."""
    with pytest.raises(ValueError, match=r"^BLEURT checkpoint /no/such: no such folder\.$"):
        full_name("bleurt", MetricSettings(bleurt_checkpoint="/no/such"))
