"""Measures the losses of a sample of the requests beside what serves, so that nobody waits for it."""

import concurrent.futures
import logging
import threading
import uuid
from typing import TYPE_CHECKING

from calm_beam.risk.monitor import RiskMonitor, WatchedPromise
from calm_beam.serving import Answer
from calm_beam.serving.request import AnyPrompt

if TYPE_CHECKING:
    from calm_beam.serving import Generator, LossProbe

_log = logging.getLogger("uvicorn.error")

# Chance of ever raising a false alarm, as `calm-beam monitor` has it where nothing else is said.
_ALPHA = 0.05


class Measurements:
    """Decodes sampled prompts by the full model too, one at a time, in a thread of its own.

    Whether a request is measured is settled before it has an output: by its id, by its group, which has to be the
    probe's, and by whether there is room for one more that waits to be measured. A request that is not measured for
    want of room is counted in `left_out`.

    Attributes:
      left_out: How many there were.
      monitor: What the losses since the start show. `calm-beam monitor --state` also keeps what was before that.
    """

    def __init__(self, generator: "Generator", probe: "LossProbe", *, most_waiting: int) -> None:
        """Starts the thread with the first answer.

        Args:
          generator: What serves.
          probe: Of the same entry.
          most_waiting: Answers that may wait to be measured, those included that are still being made.
        """
        self.left_out = 0
        self.monitor = RiskMonitor.of_promise(WatchedPromise.of(generator.manifest, generator.entry), alpha=_ALPHA)
        self._group = generator.entry.group
        self._probe = probe
        self._places = threading.BoundedSemaphore(most_waiting)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="calm-beam-probe")

    def sampled(self, group: str | None) -> str | None:
        """Returns the id of a new request if it is to be measured, and None if not.

        Args:
          group: Of its prompt, as `ServedRequest.group` has it.
        """
        request_id = uuid.uuid4().hex
        if group != self._group or not self._probe.is_sampled(request_id):
            return None
        if not self._places.acquire(blocking=False):
            self.left_out += 1
            _log.warning("not measured, since too many answers wait for that; lower --share: %d so far", self.left_out)
            return None
        return request_id

    def measure(self, request_id: str, prompt: AnyPrompt, answered: concurrent.futures.Future[Answer]) -> None:
        """Measures a sampled request once it is answered, or adds its loss as missing if it has no output.

        Args:
          request_id: As `sampled` returned it.
          prompt: As it was given.
          answered: Its answer to come, which nobody may cancel: who asked could have seen what it begins with.
        """
        answered.add_done_callback(lambda done: self._thread.submit(self._measure, request_id, prompt, done))

    def close(self) -> None:
        """Measures what has been answered, and ends the thread."""
        self._thread.shutdown()

    def _measure(self, request_id: str, prompt: AnyPrompt, answered: concurrent.futures.Future[Answer]) -> None:
        # Here, since JAX takes seconds.
        from calm_beam.serving import MeasuredLoss

        try:
            error = answered.exception()
            loss = (
                MeasuredLoss.of_failure(error)
                if isinstance(error, Exception)
                else self._probe.measure(request_id, prompt, answer=answered.result())
            )
            self.monitor = self.monitor.observe([loss.value if loss.failure is None else None])
            self._probe.add(request_id, loss)
        except OSError as error:
            # Whoever asked has their answer, also while the disk is full.
            _log.error("a loss could not be written: %s", error)
        except Exception:
            _log.exception("a loss could not be measured")
        finally:
            self._places.release()
