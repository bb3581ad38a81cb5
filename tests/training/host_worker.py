"""One host of a training: `python host_worker.py CASE FILE`; the first one writes what comes of it.

A case is JSON: `devices` and `host_devices` of each host, `strategy`, and what else `train` below
reads.
"""

import json
import os
import pathlib
import signal
import sys

import numpy as np

import slidedp_jax


def main(case, file) -> None:
    devices, host_devices = case["devices"], case["host_devices"]
    setup = slidedp_jax.configure(
        platform="cpu", num_devices=devices, num_host_devices=host_devices
    )
    import jax
    from dispatched import Dispatched

    dispatched = Dispatched()
    jax.config.update("jax_numpy_rank_promotion", "raise")
    found = train(case, setup.hosts.num_hosts, dispatched=dispatched)
    found["dispatched"] = np.array(json.dumps(dispatched.of_threads()))
    if setup.hosts.is_first:
        np.savez(file, **found)


def train(case, num_hosts, *, dispatched=None, **options):
    """Figures of all steps, then weights and optimizer state by name.

    With `dispatched`, also the bytes that each collective of the last step brings into a host.
    """
    import jax
    import optax
    from plain_training import initial_parameters, random_batch
    from streamed_training import small_config, strategy, trainer

    from slidedp_jax.checkpoint import save_together

    if "others_on" in case and case["others_on"][0] == jax.process_index():
        case = case | case["others_on"][1]
    if case.get("killed_in_save") == jax.process_index():
        save_together._Share.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    config = small_config(tied=case.get("tied", False), layers=2)
    plan = strategy(num_hosts=num_hosts, num_host_devices=case["host_devices"], **case["strategy"])
    rows = case.get("rows", 16)
    batches = [
        random_batch(config, rows, 12, packed=case.get("packed", False), seed=step)
        for step in range(*case.get("steps", [0, 3]))
    ]
    if case.get("other_rows_on") == jax.process_index():
        batches[1]["input_ids"][0, 0] += 1
    clip = case.get("clip")
    names = ("ema_decay", "frozen", "max_loss", "on_nonfinite")
    options |= {name: case[name] for name in names if name in case}
    with trainer(
        config,
        optax.adamw(case.get("learning_rate", 1e-3), weight_decay=0.1),
        plan,
        parameters=initial_parameters(config),
        max_grad_norm=clip,
        weight_rounding=case.get("rounding", "dither"),
        kernel_form=case.get("kernel_form", "whole"),
        documents_per_row=12,
        **options,
    ) as it:
        if "restore" in case:
            it.restore(case["restore"])
        metrics = []
        for batch in batches:
            before = dispatched and len(dispatched.calls)
            metrics.append(it.step(batch))
        if dispatched is not None:  # a step's collectives are issued before it returns
            network = dispatched.into_each_host(before, case["devices"])
        if case.get("poisoned"):  # weights that are not finite make gradients that are not
            it.wait()
            it.store.write_at("model.layers.1.mlp.up_proj.weight", 5, np.full(1, np.nan))
            it.step(batches[0]).grad_norm  # noqa: B018 - waits
        found = {
            "losses": np.array([own.loss for own in metrics]),
            "norms": np.array([own.grad_norm for own in metrics]),
            "evaluated": np.array(it.evaluate(batches[0])),
            "bytes": np.array([it.store.owned_bytes, it.weights.bytes_fetched]),
        }
        if dispatched is not None:
            found["network"] = np.array(network)
        if "save" in case:
            folder = case["save"].format(**os.environ)
            it.save(folder)
            it.save(folder)  # which finds it there
        if "ema_decay" in case:
            with it.evaluating():
                found["averaged"] = np.array(it.evaluate(batches[0]))
        found |= {f"weights/{name}": own for name, own in it.parameters().items()}
        for name in it.gate.parameter_names:
            for key, own in it.optimizer_state(name).items():
                found[f"{key}/{name}"] = own
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))
