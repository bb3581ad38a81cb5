"""Rows per second from a file of conversations to packed rows, beside a loop over transformers.

    python scripts/bench/bench_data.py MODEL_FOLDER --rows 5000 --json OUT

The conversations are made of the texts of the standard library's `pydoc_data.topics`, one to three
turns each. All ways are measured in turn, in one process, on as many cores as `--cores` says, so
that what else the machine does falls on all of them:

- `transformers`: one `apply_chat_template(tokenize=True)` per row, in a loop; ids only, no masks
- `one process`, `processes`: `load_examples`, with masks, checks, counts and the array of ids
- `from the cache`: the same, read from what an earlier start has kept
- `packing`: best-fit rows of `--max-seq-length` tokens

Conversations of 100 to 800 turns of 2,000 characters each are measured as well, with the model's
template and with one that renders earlier answers differently (Qwen3's rules), without white space
around the texts and with what they were cut with.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import pathlib
import pydoc_data.topics
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench_record import record, save

from slidedp_jax.data import ExampleSettings, load_examples, load_tokenizer, pack

OLD_REASONING_DROPPED = """\
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and loop.index0 > ns.question %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def paragraphs() -> list[str]:
    """English prose and code, about a page in all for each topic of Python's help."""
    topics = pydoc_data.topics.topics.values()
    return [text.strip() for topic in topics for text in topic.split("\n\n") if text.strip()]


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """Rows of one to three turns, of unequal length."""
    rng, texts = random.Random(0), itertools.cycle(paragraphs())
    for number in range(count):
        messages = [{"role": "system", "content": "You explain Python."}] if number % 3 else []
        for turn in range(rng.choice((1, 1, 2, 3))):
            question = f"Question {number}.{turn}: {next(texts)[:300]}"
            answer = " ".join(itertools.islice(texts, rng.choice((1, 2, 3))))
            messages += [{"role": "user", "content": question}]
            messages += [{"role": "assistant", "content": answer}]
        yield {"messages": messages}


def long_conversation(turns: int, characters: int, *, stripped: bool) -> dict[str, Any]:
    """One row of so many messages, with or without the white space that they are cut with."""
    text = " ".join(itertools.islice(itertools.cycle(paragraphs()), 8 * turns))
    roles = itertools.cycle(("user", "assistant"))
    contents = (text[i * 997 : i * 997 + characters] for i in range(turns))
    if stripped:
        contents = (content.strip() for content in contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def write(path: pathlib.Path, rows: Iterator[dict[str, Any]]) -> pathlib.Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall time of one call, and CPU time of it and the processes that it began."""
    start, cpu = time.perf_counter(), _cpu_s()
    work()
    return time.perf_counter() - start, _cpu_s() - cpu


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(times.ru_utime + times.ru_stime for times in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path, help="folder with tokenizer and template")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--max-seq-length", type=int, default=2048)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-only", action="store_true", help="the long conversations alone")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with tempfile.TemporaryDirectory() as folder:
        measure = long_alone if args.long_only else measured
        result = measure(args, pathlib.Path(folder), len(cores))
    save(args.json, result)


def long_alone(args: argparse.Namespace, folder: pathlib.Path, cores: int) -> dict[str, Any]:
    """The long conversations."""
    settings = ExampleSettings(max_seq_length=args.max_seq_length)
    found = long_rows(args, folder, load_tokenizer(args.model), settings)
    packages = ("tokenizers", "jinja2", "numpy")
    result = record(packages, cores=cores, load_average=os.getloadavg())
    result["command"] = result["command"].replace(str(args.model), args.model.name)
    return result | {"long_conversation_wall_and_cpu_s": found}


def measured(args: argparse.Namespace, folder: pathlib.Path, cores: int) -> dict[str, Any]:
    """All ways, round by round."""
    import transformers

    transformers.logging.set_verbosity_error()
    path = write(folder / "rows.jsonl", conversations(args.rows))
    tokenizer = load_tokenizer(args.model)
    theirs = transformers.AutoTokenizer.from_pretrained(args.model)
    settings = ExampleSettings(max_seq_length=args.max_seq_length)
    examples, report = load_examples([path], tokenizer, settings, cache=folder / "cache")

    def loop() -> None:
        with path.open() as lines:
            for line in lines:
                theirs.apply_chat_template(json.loads(line)["messages"], tokenize=True)

    ways: dict[str, Callable[[], Any]] = {
        "transformers": loop,
        "one process": lambda: load_examples([path], tokenizer, settings, num_proc=1),
        "processes": lambda: load_examples([path], tokenizer, settings, num_proc=cores),
        "from the cache": lambda: load_examples(
            [path], tokenizer, settings, cache=folder / "cache"
        ),
        "packing": lambda: pack(examples.lengths, args.max_seq_length),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, work in ways.items():
            samples[name].append(seconds(work))
    packed = pack(examples.lengths, args.max_seq_length)
    result = record(
        ("transformers", "tokenizers", "jinja2", "numpy"),
        cores=cores,
        load_average=os.getloadavg(),
        rows=report.rows_in,
        file_bytes=path.stat().st_size,
        tokens=report.num_tokens,
        packed_rows=len(packed),
        padding_share=1 - report.num_tokens / (len(packed) * args.max_seq_length),
        wall_and_cpu_s=samples,
    )
    print(f"{report.rows_in:,} rows, {report.num_tokens:,} tokens, {cores} cores")
    result["command"] = result["command"].replace(str(args.model), args.model.name)
    base, base_cpu = map(statistics.median, zip(*samples["transformers"], strict=True))
    print(f"{'':16}{'wall s':>9}{'rows/s':>12}{'x':>7}{'CPU s':>9}{'rows/CPU s':>12}{'x':>7}")
    for name, values in samples.items():
        wall, cpu = map(statistics.median, zip(*values, strict=True))
        wall, cpu, rows = max(wall, 1e-6), max(cpu, 1e-6), report.rows_in
        text = f"{wall:9.3f}{rows / wall:12,.0f}{base / wall:7.2f}"
        print(f"{name:16}{text}{cpu:9.3f}{rows / cpu:12,.0f}{base_cpu / cpu:7.2f}")
    result["long_conversation_wall_and_cpu_s"] = long_rows(args, folder, tokenizer, settings)
    print(f"padding of packed rows: {result['padding_share']:.1%}")
    return result


def long_rows(
    args: argparse.Namespace, folder: pathlib.Path, tokenizer: Any, settings: ExampleSettings
) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Seconds of one conversation, by the template and the number of turns."""
    template = folder / "old_reasoning_dropped.jinja"
    template.write_text(OLD_REASONING_DROPPED)
    ways = {
        "the model's template": tokenizer,
        "old reasoning dropped": load_tokenizer(args.model, chat_template=template),
    }
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for turns, stripped in itertools.product((100, 200, 400, 800), (True, False)):
        row = long_conversation(turns, 2000, stripped=stripped)
        path = write(folder / f"long{turns}.jsonl", iter([row]))
        for way, its in ways.items():
            name = way if stripped else f"{way}, white space around texts"
            found.setdefault(name, {})
            work = functools.partial(load_examples, [path], its, settings)
            found[name][turns] = [seconds(work) for _ in range(args.rounds)]
            wall, cpu = map(statistics.median, zip(*found[name][turns], strict=True))
            print(f"{turns} turns of 2,000 characters, {name}: {wall:.3f} s, {cpu:.3f} s of CPU")
    return found


if __name__ == "__main__":
    main()
