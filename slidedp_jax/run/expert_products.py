"""Which kernels compute the products of a mixture's experts in this run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slidedp_jax.errors import UserError
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.run.arguments import TrainArguments


def expert_products(
    args: TrainArguments, config: ModelConfig, num_tokens: int
) -> dict[str, dict[str, str]]:
    """Which realisations compute a mixture's products on this machine; none for a dense model.

    Args:
      args: what was asked for.
      config: the model.
      num_tokens: tokens of a microbatch.

    Returns:
      Array of experts' matrices -> product -> realisation.

    Raises:
      ValueError: one that was asked for by name cannot run here; every reason is listed.
    """
    if not config.num_experts:
        return {}
    from slidedp_jax.models.attention import device_target
    from slidedp_jax.models.product_forms import resolve_forms
    from slidedp_jax.process import current_setup

    target = device_target(current_setup().devices()[0][0])
    sparse = next(index for index, kind in enumerate(config.layer_kinds) if kind.sparse)
    found = {}
    for name, shape in config.layer_shapes(sparse).items():
        if len(shape) == 3:
            forms = resolve_forms(
                args.expert_products,
                target=target,
                dtype=args.dtype,
                experts=shape[0],
                rows=num_tokens * config.num_experts_per_tok,
                columns=(shape[1], shape[2]),
            )
            found[name] = forms._asdict()
    return found


def check_expert_products(args: TrainArguments, config: ModelConfig, num_tokens: int) -> None:
    """Whether a realisation that was asked for by name can run on this machine.

    Args:
      args: what was asked for.
      config: the model.
      num_tokens: tokens of a microbatch.

    Raises:
      UserError: it cannot, or the model has no experts.
    """
    if args.expert_products == "auto":
        return
    if not config.num_experts:
        raise UserError(
            f"expert_products is for mixtures of experts; {config.model_type} models have none: "
            "drop it"
        )
    if args.hardware is not None:
        return
    try:
        expert_products(args, config, num_tokens)
    except ValueError as error:
        raise UserError(str(error)) from None


def changed_products(
    before: Mapping[str, Any] | None,
    args: TrainArguments,
    config: ModelConfig,
    num_tokens: int,
) -> list[str]:
    """A note where a run goes on with other kernels than it had, which may change the last bits.

    Args:
      before: what `run.record.read_run` or a checkpoint holds of the run so far.
      args: of this start.
      config: the model.
      num_tokens: tokens of a microbatch.
    """
    then = (before or {}).get("expert_products")
    if not then or args.hardware is not None:
        return []
    now = expert_products(args, config, num_tokens)
    changed = [
        f"{product} of {name} was {then[name][product]}, now {form}"
        for name, forms in now.items()
        for product, form in forms.items()
        if then.get(name, {}).get(product, form) != form
    ]
    return [f"results may differ in the last bits: {'; '.join(changed)}"] if changed else []
