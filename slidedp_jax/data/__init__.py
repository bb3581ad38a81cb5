"""From files to the arrays of each training step.

    tokenizer = load_tokenizer(model_folder)
    examples, report = load_examples(files, tokenizer, ExampleSettings(max_seq_length=2048))
    source = BatchSource(examples, max_seq_length=2048, step_size=StepSize(per_device=8))
    for batch in source: ...

NumPy only; no JAX, no PyTorch.

| file | |
|---|---|
| `records.py`, `parquet.py` | files to records, block by block |
| `rows.py`, `fields.py` | records to checked rows |
| `conversations.py`, `content_parts.py`, `tool_calls.py` | messages and calls in every form |
| `tokenizer.py`, `chat_template.py` | the folder's tokenizer and template |
| `spans.py`, `alike_turns.py` | what the assistant said; the same in long conversations |
| `encode.py`, `encode_block.py`, `examples.py` | rows to token ids and what is learnt, compactly |
| `tokenize.py`, `workers.py` | all blocks, in several processes |
| `token_cache.py` | tokenised rows on disk, by contents |
| `unprinted.py` | what rows say and the template does not print |
| `empty_reasoning.py` | what the template prints and rows do not say: empty reasoning |
| `remarks.py` | such remarks, counted by file |
| `example_settings.py` | how rows become examples |
| `packing.py`, `row_order.py`, `batches.py` | examples into rows; a seeded order that resumes |
| `report.py`, `preview.py` | what became of the rows; examples to look at |
"""

from slidedp_jax.data.batches import BatchSource, StepBatch, StepSize, row_widths
from slidedp_jax.data.chat_template import ChatTemplate, ChatTemplateError
from slidedp_jax.data.encode import NeedsTokenizer
from slidedp_jax.data.example_settings import ExampleSettings
from slidedp_jax.data.examples import IGNORED, Examples, ExamplesBuilder
from slidedp_jax.data.packing import RowPlan, one_per_row, pack
from slidedp_jax.data.preview import account, packing_line, preview
from slidedp_jax.data.records import RowError, read_records
from slidedp_jax.data.report import DataReport
from slidedp_jax.data.rows import parse_row
from slidedp_jax.data.tokenize import load_examples
from slidedp_jax.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "BatchSource",
    "ChatTemplate",
    "ChatTemplateError",
    "DataReport",
    "ExampleSettings",
    "Examples",
    "ExamplesBuilder",
    "NeedsTokenizer",
    "RowError",
    "RowPlan",
    "StepBatch",
    "StepSize",
    "Tokenizer",
    "account",
    "load_examples",
    "load_tokenizer",
    "one_per_row",
    "pack",
    "packing_line",
    "parse_row",
    "preview",
    "read_records",
    "row_widths",
]
