"""The script API: from a Hugging Face folder and a jsonl file to a Hugging Face folder.

Put your own names in place of "Qwen3-0.6B", "chats.jsonl" and "out".
"""

import itertools

import optax

import slidedp_jax

slidedp_jax.configure()  # before the first use of JAX; takes the GPUs if there are any
base = slidedp_jax.from_pretrained("Qwen3-0.6B")
rows, report = base.rows("chats.jsonl", rows_per_step=8, max_seq_length=1024)
print(report)  # what became of the file's rows
plan = slidedp_jax.plan_for(base.config, rows_per_step=8, tokens_per_row=1024)
with slidedp_jax.Trainer(
    base.model(), optax.adamw(1e-5), strategy=plan.strategy, parameters=base.load_parameters
) as trainer:
    for batch in itertools.islice(rows, rows.num_steps(num_epochs=2)):
        print(trainer.step(batch.arrays))
    trainer.save("out/checkpoints")
    base.export(trainer, "out/export", overwrite=True)
