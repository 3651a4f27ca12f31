"""From a checked request to a sequence: tokens in, limits resolved."""

from __future__ import annotations

from dataclasses import dataclass

from batchtp.core import GenerationRequest
from batchtp.errors import RequestError
from batchtp.worker.sequence import Sequence, seed_of
from batchtp.worker.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """What the running group can hold, in tokens: the context, and the cache for one sequence."""

    context: int
    cache: int
    vocab_size: int


def make_sequence(
    number: int, request: GenerationRequest, tokenizer: Tokenizer, limits: Limits
) -> Sequence:
    """Tokenise the request. Raises RequestError when it cannot run on this group."""
    prompt_ids = _prompt_ids(request, tokenizer)
    if not prompt_ids:
        raise RequestError("empty_prompt", "The prompt has no tokens.", "prompt")
    bad = next((t for t in prompt_ids if not 0 <= t < limits.vocab_size), None)
    if bad is not None:
        raise RequestError(
            "invalid_prompt",
            f"Token id {bad} is not in the model's vocabulary of {limits.vocab_size}.",
            "prompt",
        )
    if len(prompt_ids) >= limits.context:
        raise RequestError(
            "prompt_too_long",
            f"The prompt has {len(prompt_ids)} tokens; with one for the answer that is more than "
            f"the context of {limits.context}.",
            "prompt",
        )
    if len(prompt_ids) >= limits.cache:
        raise RequestError(
            "kv_cache_too_small",
            f"The prompt has {len(prompt_ids)} tokens; the KV cache holds {limits.cache}. "
            "Raise kv_blocks or memory_fraction.",
            "prompt",
        )
    room = min(limits.context, limits.cache) - len(prompt_ids)
    sampling = request.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= tokenizer.eos_token_ids
    return Sequence(
        id=number,
        request=request,
        prompt_ids=prompt_ids,
        most_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        seed=seed_of(request),
        stop_ids=stop_ids,
    )


def _prompt_ids(request: GenerationRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    if request.messages is not None:
        return tuple(tokenizer.encode_chat(request.messages))
    if isinstance(request.prompt, str):
        return tuple(tokenizer.encode_prompt(request.prompt))
    return request.prompt or ()
