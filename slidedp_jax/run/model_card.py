"""The model card of an export: what it was made from, by which step and with what.

It holds no path of the machine. Two of its lines say which weights the folder holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "README.md"
_VERSIONS = ("slidedp_jax", "python", "jax", "flax", "optax", "numpy")


def model_card(
    run: Mapping[str, Any], *, step: int, weights: str, tokens_seen: int | None = None
) -> str:
    """Markdown, with the front matter of Hugging Face's hub where the base model is from there.

    Args:
      run: what `record.essential` gives; entries that are missing or None are left out.
      step: optimizer steps done.
      weights: in words, which numbers the folder holds.
      tokens_seen: in training, so far.
    """
    base, arguments = run.get("base_model"), run.get("arguments") or {}
    front = ["library_name: transformers"]
    if base and "/" in base:
        front.insert(0, f"base_model: {base}")
    frozen = arguments.get("freeze") or []
    kept = f", except {', '.join(f'`{pattern}`' for pattern in frozen)}," if frozen else ""
    rows = [("base model", base), *_weight_rows(step, weights), *_data_rows(run, tokens_seen)]
    if arguments:
        rows.append(("optimizer", _optimizer(arguments)))
    versions = run.get("versions") or {}
    rows.append(("versions", ", ".join(f"{n} {versions[n]}" for n in _VERSIONS if n in versions)))
    lines = [
        "---",
        *front,
        "---",
        "",
        f"# Fine-tuned{f' from {base}' if base else ''}",
        "",
        f"All parameters{kept} were trained, with slidedp_jax.",
        "",
        "| | |",
        "|---|---|",
        *(_row(name, text) for name, text in rows if text),
    ]
    return "\n".join(lines) + "\n"


def is_card_of(text: str, *, step: int, weights: str) -> bool:
    """Whether a folder with this card holds these weights."""
    return {_row(*row) for row in _weight_rows(step, weights)} <= set(text.splitlines())


def _weight_rows(step: int, weights: str) -> list[tuple[str, str]]:
    return [("step", str(step)), ("weights", weights)]


def _row(name: str, text: str) -> str:
    return f"| {name} | {text} |"


def _data_rows(run: Mapping[str, Any], tokens_seen: int | None) -> list[tuple[str, str]]:
    counts = run.get("data_counts")
    rows = []
    if counts:
        share = 100 * counts["num_supervised_tokens"] / max(1, counts["num_tokens"])
        rows.append(
            (
                "training data",
                f"{counts['rows_kept']:,} of {counts['rows_in']:,} rows, {counts['num_tokens']:,} "
                f"tokens, {share:.1f} % of them supervised",
            )
        )
    if tokens_seen is not None:
        rows.append(("tokens seen", f"{tokens_seen:,}"))
    return rows


def _optimizer(arguments: Mapping[str, Any]) -> str:
    clip = arguments["max_grad_norm"]
    return (
        f"{arguments['optim']}, peak learning rate {arguments['learning_rate']:g} "
        f"({arguments['lr_scheduler_type']}), weight decay {arguments['weight_decay']:g}, "
        f"gradient clip {clip if clip else 'none'}, computed in {arguments['dtype']}"
    )
