"""From drawn tokens to a finished request: when it stops, and what its text is."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from batchtp.core import Completion, Failure, FinishReason
from batchtp.worker.sequence import Sequence
from batchtp.worker.tokenizer import IncrementalDecoder, Tokenizer


class StopWatch:
    """Looks for a request's stop strings as its text grows."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        self._kept = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def push(self, token: int) -> bool:
        """Whether a stop string is complete with this token."""
        self._tail += self._decoder.push(token)
        found = any(stop in self._tail for stop in self._stops)
        self._tail = self._tail[-self._kept :] if self._kept else ""
        return found


def finish_reason(sequence: Sequence, stopped: bool) -> FinishReason | None:
    """Why the sequence ends after its last token, or None. `stopped`: a stop string was found."""
    if stopped or sequence.output_ids[-1] in sequence.stop_ids:
        return FinishReason.STOP
    if len(sequence.output_ids) >= sequence.most_tokens:
        return FinishReason.LENGTH
    return None


def completion_of(
    sequence: Sequence,
    reason: FinishReason,
    tokenizer: Tokenizer,
    generation: int,
    failure: Failure | None = None,
) -> Completion:
    """The sequence's completion. Text is decoded from the whole id list at once, and ends before
    the stop token or the first stop string; the ids are all there.
    """
    ids = sequence.output_ids
    told = ids[:-1] if ids and ids[-1] in sequence.stop_ids else ids
    return Completion(
        key=sequence.key,
        text=_text(told, sequence.request.sampling.stop, tokenizer),
        token_ids=tuple(sequence.output_ids),
        prompt_tokens=len(sequence.prompt_ids),
        finish_reason=reason,
        failure=failure,
        generation=generation,
    )


def _text(ids: Ids[int], stops: tuple[str, ...], tokenizer: Tokenizer) -> str:
    text = tokenizer.decode(ids)
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(cuts)] if cuts else text
