"""A training that is evaluated and saved on its way, and goes on where it stopped when run again.

Put your own names in place of "Qwen3-0.6B", "chats.jsonl", "held_out.jsonl" and "out".
"""

import pathlib

import optax

import slidedp_jax

checkpoints = pathlib.Path("out/checkpoints")
slidedp_jax.configure()
base = slidedp_jax.from_pretrained("Qwen3-0.6B")
rows, _ = base.rows("chats.jsonl", rows_per_step=8, max_seq_length=1024, packing=True)
most = rows.documents_per_row  # what the plan and the trainer make room for
held_out, _ = base.rows(
    "held_out.jsonl",
    rows_per_step=8,
    max_seq_length=1024,
    packing=True,
    most_documents_per_row=most,
    shuffle=False,
)
plan = slidedp_jax.plan_for(
    base.config, rows_per_step=8, tokens_per_row=1024, documents_per_row=most
)
print(plan)
num_steps = rows.num_steps(num_epochs=2)
resumes = any(checkpoints.glob("step_*"))
with slidedp_jax.Trainer(
    base.model(),
    optax.adamw(optax.cosine_decay_schedule(1e-5, num_steps)),
    strategy=plan.strategy,
    parameters=slidedp_jax.TO_BE_RESTORED if resumes else base.load_parameters,
    documents_per_row=most,
) as trainer:
    if resumes:
        rows.restore(trainer.restore(checkpoints).extra["rows"])
    for step in range(trainer.step_count + 1, num_steps + 1):
        print(trainer.step(next(rows).arrays))
        if step % 50 == 0 or step == num_steps:
            trainer.save(checkpoints, {"rows": rows.state()})
            loss, num_tokens = trainer.evaluate(batch.arrays for batch in held_out.one_epoch())
            print(f"held-out loss {loss:.4f} over {num_tokens} tokens")
    base.export(trainer, "out/export", overwrite=True)
