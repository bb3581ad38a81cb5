"""A Hugging Face folder as what training needs of it: model, weights, rows; and back into a folder.

    pretrained = slidedp_jax.from_pretrained("Qwen3-4B")
    rows = pretrained.rows("chats.jsonl", rows_per_step=8, max_seq_length=4096)
    ...Trainer(pretrained.model(), ..., parameters=pretrained.load_parameters)
    pretrained.export(trainer, "out")

Importing this imports no JAX.
"""

from __future__ import annotations

import datetime
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slidedp_jax.data import (
    BatchSource,
    DataReport,
    ExampleSettings,
    NeedsTokenizer,
    StepSize,
    Tokenizer,
    load_examples,
    load_tokenizer,
)
from slidedp_jax.disk_room import writing
from slidedp_jax.errors import UserError
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.hf_config import read_config
from slidedp_jax.models.hf_export import export, export_bytes
from slidedp_jax.models.hf_hub import resolve_model_folder
from slidedp_jax.models.hf_load import check_folder, load_parameters
from slidedp_jax.state.weight_rounding import Rounding, WeightRounding
from slidedp_jax.whole_files import UNFINISHED, remove_whole

if TYPE_CHECKING:
    from slidedp_jax.models.streamed import StreamedModel
    from slidedp_jax.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A checked Hugging Face folder.

    Attributes:
      folder: where it is.
      config: its model.
      tokenizer: its tokenizer; None where it has none.
      chat_template: text that replaces the folder's template, if any.
      hub_name: of the repository of which the folder is a copy, if it is one.
    """

    folder: pathlib.Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    chat_template: str | None = None
    hub_name: str | None = None

    @property
    def has_weights(self) -> bool:
        """Whether there are files of weights in the folder."""
        return any(self.folder.glob("*.safetensors"))

    def fetch_weights(self) -> None:
        """Fetch what is not here yet of a hub repository's weights, and check all by their headers.

        Raises:
          UserError: the hub cannot be reached, or they are not there, not whole or of another
            model.
        """
        try:
            if self.hub_name is not None:  # the very commit that the rest is of
                resolve_model_folder(self.hub_name, revision=self.folder.name)
            check_folder(self.folder, self.config)
        except (FileNotFoundError, ImportError, ValueError) as error:
            raise UserError(str(error)) from error

    def model(
        self,
        attention: str = "auto",
        *,
        router_aux_loss_coef: float | None = None,
        router_z_loss_coef: float = 0.0,
        expert_products: str = "auto",
        label_smoothing: float = 0.0,
        z_loss_coef: float = 0.0,
    ) -> StreamedModel:
        """The decoder, for `Trainer`.

        Args:
          attention: `auto`, `chunked` or `cudnn`.
          router_aux_loss_coef: of a mixture's load-balance loss (`models.router_losses`), 0 for
            none; None: as config.json has it, where `output_router_logits` turns it on.
          router_z_loss_coef: of the z-loss.
          expert_products: `auto` or one of `models.product_forms`.
          label_smoothing: share of the probability that every token of the vocabulary is to get
            (`models.token_loss`), in evaluation as well.
          z_loss_coef: of the square of the logits' log-sum-exp.

        Raises:
          UserError: a coefficient is given for a model without experts.
        """
        # JAX must not start before `configure`.
        from slidedp_jax.models.decoder import build
        from slidedp_jax.models.router_losses import RouterLosses
        from slidedp_jax.models.token_loss import TokenLoss

        token_loss = TokenLoss(label_smoothing=label_smoothing, z_loss_coef=z_loss_coef)
        self.check_router_losses(router_aux_loss_coef, router_z_loss_coef)
        if not self.config.num_experts:
            return build(self.config, attention=attention, token_loss=token_loss)
        if router_aux_loss_coef is None:
            router_aux_loss_coef = self.config.router_aux_loss_coef
        losses = RouterLosses(load_balance=router_aux_loss_coef, z=router_z_loss_coef)
        return build(
            self.config,
            attention=attention,
            router_losses=losses,
            expert_products=expert_products,
            token_loss=token_loss,
        )

    def check_router_losses(
        self, router_aux_loss_coef: float | None, router_z_loss_coef: float
    ) -> None:
        """Whether the model has routers, where a coefficient is not 0.

        Raises:
          UserError: it has none.
        """
        if (router_aux_loss_coef or router_z_loss_coef) and not self.config.num_experts:
            raise UserError(
                f"router_aux_loss_coef and router_z_loss_coef are for mixtures of experts; "
                f"{self.config.model_type} models have none: drop them"
            )

    def load_parameters(self, write: Callable[[str, np.ndarray], None]) -> None:
        """Give every weight to `write(name, array)`: for `Trainer(parameters=...)`."""
        load_parameters(self.folder, self.config.parameter_shapes(), write)

    def rows(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        rows_per_step: int | StepSize,
        max_seq_length: int,
        packing: bool = False,
        most_documents_per_row: int | None = None,
        shuffle: bool = True,
        seed: int = 42,
        file_weights: Sequence[float] | None = None,
        num_proc: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        progress: Callable[[int, float], None] | None = None,
        say: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> tuple[BatchSource, DataReport]:
        """The rows of jsonl, json, parquet or text files as batches, and what became of them.

        Args:
          files: see `slidedp_jax.data.read_records`.
          rows_per_step: rows of an optimizer step.
          max_seq_length: most tokens of a row.
          packing: several documents per row; give `rows.documents_per_row` to plan and trainer.
          most_documents_per_row: of packed rows; for rows to evaluate on, those of the trainer.
          shuffle: False keeps the files' order.
          seed: of the order.
          file_weights: passes over each file in an epoch: 2 takes its rows twice, 0.5 half of them,
            by turns; None: one over all.
          num_proc: processes that tokenise; None: one for each core, of large files.
          cache: folder for tokenised rows, which are mapped from there now and the next time; None:
            they are held in memory.
          progress: told how many rows are read so far, and their share of the files.
          say: takes a sentence on the cache.
          **settings: others of `slidedp_jax.data.ExampleSettings`.

        Returns:
          An endless iterator (`rows.num_steps(2)` are two epochs, `rows.one_epoch()` is all rows
          once), and the report to print.

        Raises:
          UserError: a file or a row is unusable, or text needs a tokenizer that is not there.
        """
        paths = [
            pathlib.Path(path)
            for path in ([files] if isinstance(files, (str, os.PathLike)) else files)
        ]
        try:
            examples, report = load_examples(
                paths,
                self.tokenizer,
                ExampleSettings(max_seq_length=max_seq_length, **settings),
                vocab_size=self.config.vocab_size,
                num_proc=num_proc,
                cache=None if cache is None else pathlib.Path(cache),
                progress=progress,
                say=say,
            )
        except NeedsTokenizer:
            load_tokenizer(self.folder)  # says what is missing, and where
            raise
        rows = BatchSource(
            examples,
            max_seq_length=max_seq_length,
            step_size=rows_per_step,
            seed=seed,
            packing=packing,
            most_documents_per_row=most_documents_per_row,
            shuffle=shuffle,
            file_weights=file_weights,
            pad_id=self.tokenizer.pad_id if self.tokenizer is not None else 0,
        )
        return rows, report

    def export(
        self,
        trainer: Trainer,
        folder: str | os.PathLike[str],
        *,
        dtype: str = "bfloat16",
        rounding: Rounding | None = None,
        averaged: bool = False,
        overwrite: bool = False,
        more_files: Mapping[str, str] | None = None,
    ) -> None:
        """Write the trainer's weights as a Hugging Face folder with this one's other files.

        Args:
          trainer: of this model; pending updates are waited for.
          folder: must not exist, or be empty; appears complete or not at all.
          dtype: "bfloat16", "float16" or "float32".
          rounding: to bfloat16, "dither" or "nearest"; None: the trainer's, which gives the very
            weights that a forward pass in bfloat16 uses.
          averaged: the moving averages instead; needs `ema_decay`.
          overwrite: replace a model folder that is there, once the new one is complete.
          more_files: name -> text of further files in it, such as a model card.

        Raises:
          UserError: the folder holds something (with `overwrite`: something else than a model), no
            average is kept, or `rounding` is none, or not one of that dtype.
          OSError: the file system refuses (`DiskFull`, with the sizes, where there is no room).
        """
        target = pathlib.Path(folder)
        own, path = _export_rounding(trainer, dtype, rounding), target
        if overwrite and target.is_dir() and any(target.iterdir()):
            if not (target / "config.json").is_file():
                raise UserError(f"{target} holds no model, so it is not overwritten; remove it")
            path = target.with_name(f".{target.name}{UNFINISHED}")
            remove_whole(path)
        with trainer.gate.reading() as reader:
            read: Callable[[str], np.ndarray] = reader.read_average if averaged else reader.read
            if dtype == "bfloat16":
                read = functools.partial(reader.read_rounded, rounding=own, averaged=averaged)
            shapes = self.config.parameter_shapes()
            together = trainer.together
            if together is not None and not together.is_first:
                together.follow(read)
                return
            if together is not None:
                read = together.leading(read)
            try:
                with writing(path, export_bytes(shapes, dtype)):
                    export(
                        path,
                        self.folder,
                        shapes,
                        read,
                        dtype=dtype,
                        chat_template=self.chat_template,
                        more_files=more_files,
                    )
            except (FileExistsError, ValueError) as error:
                raise UserError(str(error)) from error
            finally:
                if together is not None:
                    together.lead_no_more()
        if path != target:
            remove_whole(target)
            path.rename(target)


def _export_rounding(trainer: Trainer, dtype: str, rounding: Rounding | None) -> WeightRounding:
    try:
        own = trainer.weight_rounding.named(rounding, trainer.seed)
    except ValueError as error:
        raise UserError(str(error)) from None
    if rounding == "dither" and dtype != "bfloat16":
        raise UserError(f"rounding='dither' is for bfloat16, dtype is {dtype!r}; drop one of them")
    return own


def from_pretrained(
    name_or_folder: str | os.PathLike[str],
    *,
    weights: bool = True,
    chat_template: str | os.PathLike[str] | None = None,
    now: datetime.datetime | None = None,
) -> Pretrained:
    """Check a Hugging Face folder: its configuration, tokenizer and the headers of its weights.

    Args:
      name_or_folder: the folder, or a hub name such as Qwen/Qwen3-4B (with the `hub` extra).
      weights: False leaves them to `fetch_weights`: for planning and looking at rows none are
        needed.
      chat_template: a file that replaces the folder's template.
      now: the time that templates print with `strftime_now`; None is the time of rendering.

    Raises:
      UserError: it, or the template, is not there, not whole, or of a model that is not supported.
    """
    try:
        folder = resolve_model_folder(os.fspath(name_or_folder), weights=False)
        config = read_config(folder)
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise UserError(str(error)) from error
    template = pathlib.Path(chat_template) if chat_template else None
    if template is not None and not template.is_file():
        raise UserError(f"chat template file {template} does not exist")
    has_tokenizer = (folder / "tokenizer.json").is_file()
    is_here = pathlib.Path(name_or_folder).expanduser().is_dir()
    pretrained = Pretrained(
        folder=folder,
        config=config,
        hub_name=None if is_here else os.fspath(name_or_folder),
        tokenizer=load_tokenizer(folder, chat_template=template, now=now)
        if has_tokenizer
        else None,
        chat_template=template.read_text(encoding="utf-8") if template else None,
    )
    if weights:
        pretrained.fetch_weights()
    return pretrained
