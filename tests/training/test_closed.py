"""A closed trainer says so, whatever it is asked."""

import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import types

import numpy as np
import optax
import pytest
from plain_training import random_batch
from streamed_training import small_config, strategy

import slidedp_jax
from slidedp_jax import Trainer, UserError
from slidedp_jax.models import decoder
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.folder import RunFolder
from slidedp_jax.run.samples import Samples
from slidedp_jax.run.saving import Saves
from slidedp_jax.step.passes import Passes

CONFIG = small_config(layers=1)


@pytest.fixture(scope="module")
def closed():
    with Trainer(
        decoder.build(CONFIG),
        optax.sgd(1e-2),
        strategy=strategy(),
        kernel_form="whole",
        ema_decay=0.5,
        num_devices=1,
    ) as it:
        it.step(random_batch(CONFIG, 4, 8, packed=False))
    return it


BATCH = random_batch(CONFIG, 4, 8, packed=False)
FOLDER = RunFolder(root=pathlib.Path("/nowhere"), resume_from=None, lock=None)
ARGUMENTS = TrainArguments(model_name_or_path="m", train_file=["t"], output_dir="/nowhere")
QUIET = types.SimpleNamespace(doing=lambda _: contextlib.nullcontext())
ROWS = {"input_ids": np.ones((1, 16), np.int32)}

OF_TRAINER = {
    "step": lambda it: it.step(BATCH),
    "evaluate": lambda it: it.evaluate(BATCH),
    "parameters": lambda it: it.parameters(),
    "averaged_parameters": lambda it: it.averaged_parameters(),
    "gradients": lambda it: it.gradients(BATCH),
    "set_hyperparameters": lambda it: it.set_hyperparameters(learning_rate=0.1),
    "optimizer_state": lambda it: it.optimizer_state("lm_head.weight"),
    "evaluating": lambda it: it.evaluating().__enter__(),
    "save": lambda it: it.save("/nowhere"),
    "save_beside": lambda it: it.save_beside("/nowhere"),
    "prepare_save": lambda it: it.prepare_save(),
    "restore": lambda it: it.restore("/nowhere"),
    "wait": lambda it: it.wait(),
    "__enter__": lambda it: it.__enter__(),
}

OF_PASSES = {
    "forward_backward": lambda it: it.passes.forward_backward(it.weights, None, None),
    "send": lambda it: it.passes.send(0, []),
    "next_logits": lambda it: it.passes.next_logits((), ROWS, np.zeros(1, np.int32), []),
    "init_caches": lambda it: it.passes.init_caches(1, 64),
    "prepare": lambda it: it.passes.prepare(BATCH),
    "losses": lambda it: it.passes.losses(None),
}

TAKING_ONE = {
    "slidedp_jax.generate.generate": lambda f, it: f(it, [[1]], max_new_tokens=1),
    "slidedp_jax.generate.GrowingRows": lambda f, it: f(it, [[1]], max_new_tokens=1),
    "slidedp_jax.pretrained.Pretrained.export": lambda f, it: f(pretrained(), it, "/nowhere"),
    "slidedp_jax.run.export.export_run": lambda f, it: f(
        it, FOLDER, pretrained(), ARGUMENTS, run={}, tokens_seen=0
    ),
    "slidedp_jax.run.samples.Samples.take": lambda f, it: f(samples(), it, "at step 1", print),
    "slidedp_jax.run.saving.Saves.prepare": lambda f, it: f(saves(), it, 1, 2),
    "slidedp_jax.run.saving.Saves.save": lambda f, it: f(saves(), it, {}, QUIET, waits=True),
}
"""Public functions with a parameter of type `Trainer`."""

STILL_THERE = {"close", "finish_save", "__exit__", "__init__"}


def pretrained():
    fields = {"folder": None, "config": CONFIG, "tokenizer": None}
    return slidedp_jax.Pretrained(**fields)


def samples():
    words = types.SimpleNamespace(
        chat_templates={}, stop_ids=(), encode=lambda text: [*text.encode()], begun=lambda ids: ids
    )
    arguments = dataclasses.replace(ARGUMENTS, sample_prompts=["a"])
    return Samples(arguments, words, pathlib.Path("/nowhere/samples.jsonl"))


def saves():
    folder = pathlib.Path("/nowhere")
    none = {"metrics": folder, "measure": None, "saved": None}
    return Saves(ARGUMENTS, None, folder, **none)


def is_public(name):
    return not name.startswith("_") or name in ("__enter__", "__exit__", "__init__")


def functions_of(owner):
    return {
        name: value
        for name, value in vars(owner).items()
        if inspect.isfunction(value) and is_public(name)
    }


def test_every_public_method_is_asked():
    assert functions_of(Trainer).keys() == OF_TRAINER.keys() | STILL_THERE
    assert functions_of(Passes).keys() == OF_PASSES.keys() | {"__init__"}


def modules():
    for module in pkgutil.walk_packages(slidedp_jax.__path__, "slidedp_jax."):
        if not module.name.endswith("__main__"):
            yield importlib.import_module(module.name)


def takes_a_trainer(function):
    annotations = {n: a for n, a in function.__annotations__.items() if n != "return"}
    return "Trainer" in annotations.values()


def functions_that_take_one():
    """Full names; of a class that is made with a trainer, the class."""
    for module in modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != module.__name__ or not is_public(name):
                continue
            if inspect.isfunction(value) and takes_a_trainer(value):
                yield f"{module.__name__}.{name}"
            for method in functions_of(value) if inspect.isclass(value) else ():
                if takes_a_trainer(vars(value)[method]):
                    suffix = "" if method == "__init__" else f".{method}"
                    yield f"{module.__name__}.{name}{suffix}"


def test_every_public_function_that_takes_a_trainer_is_asked():
    assert {*functions_that_take_one()} == TAKING_ONE.keys()


@pytest.mark.parametrize("call", [*OF_TRAINER.values(), *OF_PASSES.values()])
def test_a_method_says_that_the_trainer_is_closed(closed, call):
    with pytest.raises(UserError, match="the trainer is closed"):
        call(closed)


@pytest.mark.parametrize("name", TAKING_ONE)
def test_a_function_says_that_the_trainer_is_closed(closed, name):
    module, attribute = name.rsplit(".", 1)
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        package, _, kind = module.rpartition(".")
        owner = getattr(importlib.import_module(package), kind)
    with pytest.raises(UserError, match="the trainer is closed"):
        TAKING_ONE[name](getattr(owner, attribute), closed)


def test_nothing_to_generate_is_no_way_around_it(closed):
    with pytest.raises(UserError, match="the trainer is closed"):
        slidedp_jax.generate.generate(closed, [], max_new_tokens=1)


def test_closing_twice_is_closing_once_and_figures_stay(closed):
    closed.close()
    assert (closed.step_count, closed.num_devices, closed.kernel_form) == (1, 1, "whole")
