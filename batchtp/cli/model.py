"""`batchtp model`: look at model files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from batchtp.cli import options
from batchtp.cli.failures import handled
from batchtp.cli.output import emit_json, emit_table, emit_text
from batchtp.model.inspect import Inspection, Shares, inspect_model
from batchtp.model.memory import CARD_SHARE, GIB, fits
from batchtp.model.resolve import resolve_model
from batchtp.model.shard_table import TensorShare

_MIB = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Look at model files.")
    group.command("inspect")(inspect)
    app.add_typer(group, name="model")


@handled
def inspect(
    path: Annotated[str, typer.Argument(help="Directory, GGUF file, hub id or demo name.")],
    tp: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="Every rank's tensors at this degree.", show_default=False),
    ] = None,
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of a sequence. 0: the model's most.")
    ] = 0,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    card_gib: Annotated[
        float | None,
        typer.Option(min=0.1, help="Memory of a card: which degrees fit?", show_default=False),
    ] = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    home: options.Home = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show a checkpoint's format, its shards at every TP degree and the memory they take.

    Loads no weight. Memory is that of a GPU, a card a rank: weights as the int4 kernel holds them,
    the KV cache of that many sequences of that many tokens, and an estimate of what steps work in.
    """
    settings = options.settings_for(debug, home=home, dtype=dtype, quantize=quantize)
    found = inspect_model(
        resolve_model(path, settings.home_path).path,
        sequences=sequences,
        context=context,
        dtype=settings.dtype,
        quantize=settings.quantize,
    )
    if as_json:
        emit_json(_document(found, tp, card_gib))
        return
    emit_table(["what", "value"], [(k.replace("_", " "), v) for k, v in found.facts.items()])
    _show_shares(found)
    _show_memory(found, card_gib)
    if tp is not None:
        _show_table(found, tp)


def _show_shares(found: Inspection) -> None:
    emit_text("\nEach rank's share, rank 0 first:")
    emit_table(
        ["tp", "query heads", "KV heads", "MLP features", "vocabulary"],
        [
            (
                shares.tp,
                _each(shares.query_heads),
                _each(shares.kv_heads),
                _each(shares.mlp_features),
                _each(shares.vocabulary),
            )
            for shares in found.shares
        ],
    )


def _show_memory(found: Inspection, card_gib: float | None) -> None:
    load = found.load
    emit_text(
        f"\nGiB on the fullest rank, with {load.sequences} sequences of {load.context} tokens:"
    )
    columns = ["tp", "weights", "KV cache", "working", "in all"]
    if card_gib is not None:
        columns.append(f"fits {card_gib:g} GiB")
    emit_table(columns, [_memory_row(shares, card_gib) for shares in found.shares])
    if card_gib is not None:
        emit_text(f"A card is filled to {CARD_SHARE:.0%}, the default of memory_fraction.")


def _memory_row(shares: Shares, card_gib: float | None) -> tuple[object, ...]:
    most = max(shares.memory, key=lambda rank: rank.total)
    sizes = (most.weights, most.kv_cache, most.working, most.total)
    row = (shares.tp, *(f"{size / GIB:.2f}" for size in sizes))
    return row if card_gib is None else (*row, "yes" if _fits(shares, card_gib) else "no")


def _fits(shares: Shares, card_gib: float) -> bool:
    return fits(shares.memory, int(card_gib * GIB))


def _show_table(found: Inspection, tp: int) -> None:
    emit_text(f"\nTensors of each rank at tp {tp}; MiB of all layers together:")
    rows = [
        (rank, share.tensor, *_table_row(share))
        for rank, table in enumerate(found.table(tp))
        for share in table
    ]
    emit_table(
        ["rank", "tensor", "layers", "inputs", "outputs", "groups", "offset", "form", "MiB"], rows
    )


def _table_row(share: TensorShare) -> tuple[object, ...]:
    return (
        share.layers,
        _run(share.inputs),
        _run(share.outputs),
        _run(share.groups),
        share.first_group_offset or "",
        share.form,
        f"{share.layers * share.nbytes / _MIB:.2f}",
    )


def _run(run: range) -> str:
    return f"{run.start}-{run.stop - 1}" if run else ""


def _document(found: Inspection, tp: int | None, card_gib: float | None) -> dict[str, Any]:
    shares = []
    for one in found.shares:
        document = asdict(one) | {"memory": [asdict(rank) for rank in one.memory]}
        if card_gib is not None:
            document["fits"] = _fits(one, card_gib)
        shares.append(document)
    document = {**found.facts, "load": asdict(found.load), "shares": shares}
    if tp is not None:
        document["table"] = [[_share_document(s) for s in table] for table in found.table(tp)]
    return document


def _share_document(share: TensorShare) -> dict[str, Any]:
    runs = {
        name: [run.start, run.stop]
        for name, run in (
            ("inputs", share.inputs),
            ("outputs", share.outputs),
            ("groups", share.groups),
        )
    }
    return {
        "tensor": share.tensor,
        "form": share.form,
        "layers": share.layers,
        **runs,
        "first_group_offset": share.first_group_offset,
        "nbytes": share.nbytes,
    }


def _each(values: Sequence[float]) -> str:
    """A value for every rank; one of them where all are the same."""
    if len(set(values)) == 1:
        return f"{values[0]} each" if len(values) > 1 else str(values[0])
    return " ".join(map(str, values))
