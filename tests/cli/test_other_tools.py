"""People from other tools: their settings are answered with ours, or with why there is none."""

from __future__ import annotations

import dataclasses
import re

import pytest

from slidedp_jax.errors import UserError
from slidedp_jax.run import other_tools
from slidedp_jax.run.arguments import FIELDS, parse_arguments
from slidedp_jax.run.other_tools import ANSWERS, BEGINNINGS, CALLED_HERE

NEEDED = ["--model_name_or_path", "m", "--train_file", "a.jsonl", "--output_dir", "o"]

NAMES = {
    "scripts of transformers": "per_device_eval_batch_size evaluation_strategy warmup_ratio "
    "dataset_name dataset_config_name validation_split_percentage block_size overwrite_cache "
    "preprocessing_num_workers tokenizer_name use_fast_tokenizer torch_dtype trust_remote_code "
    "low_cpu_mem_usage streaming overwrite_output_dir model_revision cache_dir token "
    "with_tracking report_to num_warmup_steps max_train_samples group_by_length logging_dir "
    "no_cuda jit_mode_eval fp16_opt_level dataloader_num_workers",
    "trl": "model_init_kwargs chat_template_path dataset_text_field dataset_kwargs "
    "dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing "
    "packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss "
    "assistant_only_loss loss_type activation_offloading pad_token use_peft lora_r lora_alpha "
    "load_in_4bit dataset_train_split attn_implementation",
    "axolotl": "base_model datasets test_datasets val_set_size sequence_len sample_packing "
    "eval_sample_packing pad_to_sequence_len micro_batch_size num_epochs optimizer lr_scheduler "
    "cosine_min_lr_ratio train_on_inputs group_by_length bf16 fp16 tf32 gradient_checkpointing "
    "flash_attention warmup_ratio evals_per_epoch saves_per_epoch deepspeed fsdp fsdp_config "
    "special_tokens adapter lora_target_modules load_in_8bit wandb_project unfrozen_parameters "
    "dataset_prepared_path resume_from_checkpoint auto_resume_from_checkpoints chat_template "
    "early_stopping_patience loss_watchdog_threshold sequence_parallel_degree torch_compile "
    "curriculum_sampling default_system_message eot_tokens embedding_lr rl excess_length_strategy",
    "DeepSpeed": "train_batch_size train_micro_batch_size_per_gpu gradient_clipping "
    "zero_optimization zero_stage offload_optimizer offload_param deepspeed_config "
    "activation_checkpointing scheduler fp16 bf16",
    "LLaMA-Factory": "stage finetuning_type template dataset dataset_dir eval_dataset cutoff_len "
    "train_on_prompt mask_history max_samples val_size neat_packing tokenized_path mix_strategy "
    "interleave_probs pure_bf16 use_galore galore_rank use_badam use_muon plot_loss lora_rank "
    "quantization_bit flash_attn enable_liger_kernel ddp_timeout freeze_trainable_layers "
    "disable_shuffling use_swanlab swanlab_project include_effective_tokens_per_second "
    "tool_format rope_scaling",
    "torchtune": "checkpointer epochs max_steps_per_epoch batch_size clip_grad_norm compile "
    "enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd "
    "metric_logger log_every_n_steps dtype device seed packed",
    "launchers": "nproc_per_node nnodes node_rank master_addr master_port num_processes gpu_ids "
    "mixed_precision num_machines machine_rank main_process_port local_rank",
}


def refusal(name):
    with pytest.raises(UserError) as caught:
        parse_arguments([*NEEDED, f"--{name}", "1"])
    return str(caught.value)


@pytest.mark.parametrize("tool", NAMES)
def test_settings_of_other_tools_are_answered(tool):
    for name in NAMES[tool].split():
        if name not in FIELDS:
            assert "did you mean" not in refusal(name), name
            assert "see --help" not in refusal(name), name


def test_every_setting_of_transformers_is_answered():
    transformers = pytest.importorskip("transformers")
    names = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert len(names) > 100
    unknown = [
        name
        for name in names
        if name not in FIELDS and name not in CALLED_HERE and other_tools.answer(name) is None
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resume_from_checkpoint", "resuming is automatic"),
        ("gradient_checkpointing", "recomputation is planned"),
        ("deepspeed", "the training state lies in host memory in any case"),
        ("use_tensorboard", "`report_to` takes tensorboard and wandb"),
        ("plot_loss", "`slidedp report` draws it"),
        ("lora_r", "every parameter is trained"),
        ("load_in_4bit", "nothing is quantised"),
        ("fp16", "there is no float16"),
        ("bf16", "`dtype` is bfloat16 (the default) or float32"),
        ("num_gpus", "here it is called num_devices (compute devices; all by default)"),
        ("gpus", "`num_devices` 2 takes two of them, `devices` 0,2 these"),
        ("template", "the model's own chat template is used"),
        ("enable_thinking", 'goes to `chat_template_kwargs`, here {"enable_thinking": false}'),
        ("train-on-inputs", "here it is called loss_on (auto, assistant, completion or all)"),
        ("FP16", "there is no float16"),
    ],
)
def test_what_is_said(name, said):
    assert said in refusal(name)


def test_keys_of_a_file_are_answered_as_flags_are(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("gradient_checkpointing: true\n")
    with pytest.raises(UserError, match=r"key in .*run\.yaml: gradient_checkpointing; recomputa"):
        parse_arguments([*NEEDED, "--config", str(path)])


def test_each_name_is_answered_once_and_no_setting_of_ours_is():
    tables = (other_tools._CALLED, other_tools._ANSWERS)
    names = [name for table in tables for _, words in table for name in words.split()]
    assert len(names) == len(set(names)) > 300
    assert not set(names) & set(FIELDS)
    assert not [name for name in FIELDS for begin in BEGINNINGS if name.startswith(begin)]
    assert set(CALLED_HERE.values()) <= set(FIELDS)
    assert names == [name.lower() for name in names]


def test_answers_name_settings_that_exist():
    texts = set(ANSWERS.values())
    named = {word for text in texts for word in re.findall("`([^`]*)`", text)}
    commands = {"slidedp plan", "slidedp preview", "slidedp report", "huggingface-cli upload"}
    assert "keep_activations" in named and named - commands <= set(FIELDS)


def test_typing_errors_get_the_nearest_setting():
    assert "did you mean weight_decay" in refusal("weigth_decay")
    assert "see --help" in refusal("zzz")
