"""Completions of given prompts while a model is trained: on the console and in `samples.jsonl`."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from slidedp_jax.data import Tokenizer
from slidedp_jax.generate import encode_prompt, generate
from slidedp_jax.run.arguments import TrainArguments
from slidedp_jax.run.metrics_file import MetricsFile, drop_after
from slidedp_jax.trainer import Trainer


class Samples:
    """Greedy completions of the prompts of `sample_prompts`.

    Args:
      args: the run's settings.
      tokenizer: of the model; without one nothing is sampled.
      path: the file of all samples, one JSON object each: step, prompt, completion, time.
    """

    def __init__(self, args: TrainArguments, tokenizer: Tokenizer | None, path: pathlib.Path):
        self._prompts = args.sample_prompts
        self._max_new_tokens = args.sample_max_new_tokens
        self._tokenizer = tokenizer
        self._path = path
        self._last_step: int | None = None

    def take(self, trainer: Trainer, when: str, say: Callable[[str], None]) -> None:
        """Sample from the weights of the last step, once for each step.

        Args:
          trainer: owns the weights.
          when: of the run, for the console.
          say: takes a line for the console.
        """
        step, tokenizer = trainer.step_count, self._tokenizer
        if not self._prompts or tokenizer is None or step == self._last_step:
            return
        outputs = generate(
            trainer,
            [encode_prompt(tokenizer, prompt) for prompt in self._prompts],
            max_new_tokens=self._max_new_tokens,
            stop_ids=tokenizer.stop_ids,
        )
        drop_after(self._path, step - 1)  # the same, by an earlier start
        file = MetricsFile(self._path)
        try:
            for prompt, output in zip(self._prompts, outputs, strict=True):
                text = tokenizer.decode(output, skip_special_tokens=True)
                say(f"sample {when}: {prompt!r} -> {text!r}")
                file.write({"step": step, "prompt": prompt, "completion": text})
        finally:
            file.close()
        self._last_step = step
