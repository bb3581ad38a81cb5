"""Settings of other trainers, answered with ours or with why there is none.

Names are those of transformers' TrainingArguments and its example scripts, trl, axolotl, DeepSpeed,
LLaMA-Factory, torchtune and the launchers of torch and accelerate. A name that is a setting of ours
is not here: it means the same. Words in backticks are settings of ours; a test holds them to that.
"""

from __future__ import annotations

_Table = tuple[tuple[str, str], ...]
"""What is answered, and the names that it answers."""

_CALLED: _Table = (
    (
        "model_name_or_path",
        "base_model model model_name model_path pretrained_model_name_or_path checkpointer",
    ),
    (
        "train_file",
        "dataset datasets data data_path data_files dataset_path train_data train_files "
        "train_dataset train_on_dataset pretraining_dataset",
    ),
    (
        "validation_file",
        "eval_file eval_files eval_data eval_dataset eval_datasets test_datasets val_file "
        "val_dataset validation_files dataset_val",
    ),
    ("output_dir", "export_dir output_path save_dir output save_path"),
    (
        "max_seq_length",
        "max_length max_len cutoff_len sequence_len max_target_length seq_length seq_len "
        "max_seq_len model_max_length block_size",
    ),
    ("packing", "sample_packing neat_packing packed group_texts packing_strategy"),
    (
        "per_device_train_batch_size",
        "micro_batch_size per_device_batch_size batch_size per_gpu_train_batch_size "
        "train_micro_batch_size_per_gpu device_train_microbatch_size",
    ),
    ("gradient_accumulation_steps", "accumulation_steps grad_accumulation_steps grad_accum_steps"),
    ("num_train_epochs", "num_epochs epochs max_epochs"),
    ("max_steps", "steps max_train_steps total_steps train_steps"),
    ("optim", "optimizer optimizer_name optim_type use_muon"),
    ("learning_rate", "lr peak_lr"),
    ("lr_scheduler_type", "lr_scheduler scheduler lr_schedule"),
    ("min_lr_ratio", "cosine_min_lr_ratio min_lr min_lr_rate"),
    ("warmup_steps", "num_warmup_steps lr_warmup_steps"),
    ("weight_decay", "wd"),
    ("adam_beta1", "beta1 adam_b1 momentum"),
    ("adam_beta2", "beta2 adam_b2"),
    ("adam_epsilon", "eps adam_eps"),
    (
        "max_grad_norm",
        "max_norm clip_grad_norm clip_grad gradient_clipping gradient_clip_val "
        "gradient_clipping_threshold",
    ),
    ("max_train_samples", "max_samples max_train_examples"),
    (
        "loss_on",
        "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt train_on_input "
        "train_on_responses_only mask_history mask_prompt roles_to_train",
    ),
    (
        "attention",
        "attn_implementation flash_attn flash_attention sdp_attention eager_attention "
        "flex_attention xformers_attention use_flash_attention_2 flash_attention_2",
    ),
    ("save_total_limit", "keep_last_n_checkpoints keep_n_checkpoints max_checkpoints"),
    ("save_steps", "checkpoint_interval save_interval checkpoint_every save_every"),
    ("eval_steps", "eval_interval eval_every"),
    ("eval_at_start", "eval_on_start"),
    ("early_stopping_patience", "early_stopping_steps early_stopping"),
    ("train_file_weights", "interleave_probs dataset_weights sampling_weights data_weights"),
    (
        "dataset_num_proc",
        "preprocessing_num_workers dataset_processes num_proc num_workers preprocessing_num_proc",
    ),
    ("data_cache", "dataset_prepared_path tokenized_path data_cache_dir"),
    ("logging_steps", "log_every_n_steps log_interval steps_per_print"),
    ("num_devices", "n_gpu n_gpus num_gpus num_processes nproc_per_node world_size"),
    ("num_hosts", "nnodes num_nodes num_machines"),
    ("host_index", "node_rank machine_rank"),
    ("coordinator", "master_addr main_process_ip"),
    ("devices", "gpu_ids cuda_visible_devices visible_devices"),
    ("platform", "use_cpu no_cuda device accelerator"),
    ("shuffle", "shuffle_dataset shuffle_merged_datasets disable_shuffling"),
    ("freeze", "freeze_layers frozen_parameters freeze_modules"),
    ("ema_decay", "ema use_ema"),
    ("chat_template_path", "chat_template_jinja chat_template_file"),
    ("chat_template_kwargs", "template_kwargs"),
    ("truncation_keep", "truncation_mode truncation_side"),
    ("over_long", "excess_length_strategy truncation"),
    (
        "columns",
        "dataset_text_field text_column text_field field_messages message_field text_column_name "
        "column_map",
    ),
    ("router_aux_loss_coef", "moe_aux_loss_coef moe_aux_loss_coeff aux_loss_coef"),
    ("label_smoothing_factor", "label_smoothing"),
    ("z_loss_coef", "z_loss z_loss_weight z_loss_multiplier zloss"),
    ("learning_rate_by_name", "lr_groups embedding_lr"),
    ("lr_decay_steps", "num_decay_steps decay_steps"),
    ("lr_decay_type", "decay_type"),
    ("profile_steps", "profiler_steps profile profiler_steps_start wall_clock_breakdown"),
    ("router_z_loss_coef", "moe_z_loss_coef moe_z_loss_coeff router_z_loss"),
    ("max_loss", "loss_watchdog_threshold"),
    ("device_memory_budget", "gpu_memory_limit gpu_memory_utilization"),
    ("sample_prompts", "eval_prompts"),
    ("export_dtype", "save_dtype"),
)
"""First: our setting."""

_ANSWERS: _Table = (
    (
        "resuming is automatic: the same command goes on from the newest checkpoint in "
        "`output_dir`, at the place in the data where it was",
        "resume_from_checkpoint auto_resume_from_checkpoints resume resume_training "
        "ignore_data_skip restore_callback_states_from_checkpoint",
    ),
    (
        "recomputation is planned: layers whose results fit the GPU are not recomputed "
        "(`keep_activations`)",
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
        "activation_checkpointing_kwargs use_gradient_checkpointing "
        "enable_activation_checkpointing recompute activation_checkpointing_mode",
    ),
    (
        "the training state lies in host memory in any case and layers are streamed to the GPUs; "
        "what fits stays there, which is planned (`slidedp plan`)",
        "activation_offloading enable_activation_offloading cpu_offload offload offload_optimizer "
        "offload_param offload_params low_cpu_mem_usage max_memory device_map deepspeed ds_config "
        "deepspeed_config zero_optimization zero_stage fsdp fsdp_cpu_offload zero3_init_flag "
        "optimizer_in_bwd paged_optimizer fsdp_* zero_* zero3_* deepspeed_* offload_*",
    ),
    (
        "every parameter is trained here, there are no adapters; `freeze` leaves parameters as "
        "they are",
        "use_peft peft adapter adapters lora qlora finetuning_type use_dora use_rslora dora "
        "additional_target modules_to_save use_llama_pro loraplus_lr_ratio lora_* peft_* qlora_* "
        "relora_* oft_* adalora_*",
    ),
    (
        "it is the other way round here: `freeze` takes patterns of the names that stay as they "
        "are",
        "unfrozen_parameters trainable_parameters freeze_trainable_layers "
        "freeze_trainable_modules freeze_extra_modules",
    ),
    (
        "the model's own chat template is used; a file with another goes to `chat_template_path`",
        "template chat_template",
    ),
    (
        "what the model's template asks for goes to `chat_template_kwargs`, here "
        '{"enable_thinking": false}; `slidedp preview` shows what comes of it',
        "enable_thinking thinking reasoning",
    ),
    (
        "all GPUs are used; `num_devices` 2 takes two of them, `devices` 0,2 these",
        "gpus gpu",
    ),
    (
        "nothing is quantised: master weights are float32, layers are computed in `dtype`",
        "load_in_4bit load_in_8bit quantization_bit quantization_method quantization quantize "
        "gptq fp8 qat bnb_* gptq_* awq_* hqq_* int8_*",
    ),
    (
        "master weights are float32 and layers are computed in `dtype`, bfloat16 or float32; "
        "there is no float16 and no pure bfloat16 training",
        "fp16 float16 half fp16_opt_level pure_bf16",
    ),
    (
        "`dtype` is bfloat16 (the default) or float32, in training and evaluation; master weights "
        "are always float32",
        "bf16 bfloat16 torch_dtype model_dtype precision mixed_precision fp32 float32 tf32 "
        "bf16_full_eval fp16_full_eval",
    ),
    (
        "one process uses the GPUs of one host, all of them unless `num_devices` or `devices` "
        "says otherwise; no launcher is needed, and several hosts are `num_hosts`",
        "local_rank master_port main_process_port accelerator_config accelerate_config "
        "parallelism_config tensor_parallel_size tensor_parallel_degree pipeline_parallel_size "
        "sequence_parallel_degree sequence_parallel_size context_parallel_size data_parallel_size "
        "heads_k_stride ring_attn_func ddp log_on_each_node save_on_each_node ddp_* nccl_*",
    ),
    (
        "`report_to` takes tensorboard and wandb (project and entity: WANDB_PROJECT, "
        "WANDB_ENTITY); "
        "metrics.jsonl in `output_dir` has a line per step (loss, grad_norm, learning_rate, "
        "tokens_per_second, ...), and `slidedp report` draws it",
        "project tracker_project_name log_with use_wandb use_tensorboard use_mlflow use_comet "
        "wandb tensorboard logger log_level log_level_replica metric_logger plot_loss "
        "with_tracking use_swanlab wandb_* swanlab_* mlflow_* comet_* trackio_* tensorboard_* "
        "neptune_*",
    ),
    (
        "no other weights are loaded at the end: `save_best` keeps the checkpoint with the lowest "
        "`metric_for_best_model` (smaller is better), which can be exported",
        "load_best_model_at_end greater_is_better",
    ),
    (
        "saves go by steps: `save_steps` (null: only the end, with `save_at_end`); evaluation by "
        "`eval_steps` or `eval_epochs` (1 for each epoch, 0.25 for four times; null: at the end)",
        "save_strategy eval_strategy evaluation_strategy logging_strategy saves_per_epoch "
        "evals_per_epoch eval_delay logging_first_step do_eval checkpointing_steps "
        "save_every_epoch",
    ),
    (
        "checkpoints hold all state; the model alone, as a Hugging Face folder, is the `export`",
        "save_only_model save_safetensors save_merged_model enable_jit_checkpoint",
    ),
    (
        "nothing is uploaded: export/ in `output_dir` is a Hugging Face folder, for "
        "`huggingface-cli upload`",
        "push_to_hub hub_model_id hub_*",
    ),
    (
        "data are files: `train_file` takes .jsonl, .json, .parquet and .txt; save a data set of "
        "the hub as one (to_json, to_parquet)",
        "dataset_name dataset_config_name dataset_config dataset_dir dataset_split split "
        "train_split dataset_train_split",
    ),
    (
        "no rows are split off: put those to evaluate on into a file (`validation_file`)",
        "val_size val_set_size validation_split_percentage test_size eval_split "
        "dataset_test_split eval_on_each_dataset",
    ),
    (
        "rows are tokenised once, block by block, and memory-mapped from `data_cache`, where they "
        "are found by their contents: nothing needs streaming, and nothing there has to be "
        "overwritten (null keeps none)",
        "streaming buffer_size preprocessing_batch_size overwrite_cache skip_prepare_dataset "
        "dataset_kwargs dataset_keep_in_memory dataset_shard_num dataset_shard_idx dataloader_*",
    ),
    (
        "rows of all files are mixed by one seeded order (`shuffle`, `data_seed`); "
        "`train_file_weights` says how often an epoch takes each file",
        "mix_strategy curriculum_sampling dataset_exact_deduplication",
    ),
    (
        "padded rows get the smallest of a few widths; `packing` leaves no padding, with "
        "documents kept apart, in evaluation as in training",
        "group_by_length train_sampling_strategy length_column_name pad_to_multiple_of "
        "pad_to_max_length pad_to_sequence_len padding_free batch_flattening padding padding_side "
        "eval_packing eval_sample_packing",
    ),
    (
        "fields that mean nothing are ignored and closing tokens are learnt; `columns` maps "
        "names, `slidedp preview` shows what is learnt",
        "remove_unused_columns label_names train_on_eos train_on_eot",
    ),
    (
        "an epoch ends with a smaller step, so that every row is taken once; longer rows: "
        "`over_long`",
        "drop_last drop_long_sequences dataloader_drop_last",
    ),
    (
        "evaluation measures the loss of all rows of `validation_file`, as many at a time as in "
        "training",
        "per_device_eval_batch_size per_gpu_eval_batch_size eval_batch_size "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics "
        "include_for_metrics prediction_loss_only compute_accuracy do_predict "
        "predict_with_generate",
    ),
    (
        "rows of a step are `per_device_train_batch_size` x `gradient_accumulation_steps` x "
        "`num_devices`",
        "train_batch_size global_batch_size total_batch_size effective_batch_size",
    ),
    (
        "how many rows are computed at once is planned (`rows_per_microbatch`); rows of a step: "
        "`per_device_train_batch_size`, which can be auto",
        "auto_find_batch_size",
    ),
    (
        "the loss is the cross-entropy of the supervised tokens, averaged over all of a step; a "
        "loss of one's own goes with slidedp_jax.adapt (docs/bring_your_own_model.md)",
        "neftune_noise_alpha noisy_embedding_alpha "
        "loss_type use_dft_loss average_tokens_across_devices ignore_pad_token_for_loss loss",
    ),
    (
        "this is supervised fine-tuning, or training on text rows; there is no preference or "
        "reinforcement learning",
        "stage rl rlhf reward_model beta ref_model pref_loss dpo_* ppo_* kto_* grpo_* orpo_* "
        "cpo_* simpo_* rpo_* rl_* reward_model_* ref_model_*",
    ),
    (
        "XLA compiles the whole step and logits never exist whole: there is nothing to switch on",
        "torch_compile torch_compile_backend torch_compile_mode compile use_liger_kernel "
        "use_liger enable_liger_kernel liger_kernel_config use_unsloth use_cache sdp_backend "
        "jit_mode_eval torch_empty_cache_steps gc_steps unsloth_* liger_* flash_attn_* "
        "torch_compile_*",
    ),
    (
        "`optim` is adamw, lion, sgd, adafactor or muon; a script takes any optax transformation, "
        "with groups, schedules and masks (slidedp_jax.Trainer)",
        "optim_args optim_target_modules optimizer_kwargs lr_scheduler_kwargs "
        "embedding_lr_scale adam_beta3 adam_epsilon2 use_galore use_apollo use_badam "
        "use_adam_mini lr_quadratic_warmup cosine_constant_lr_ratio layerwise_lr_decay galore_* "
        "apollo_* badam_*",
    ),
    (
        "tokenizer, special tokens and embeddings are those of the model's folder; "
        "`chat_template_path` replaces its template",
        "tokenizer tokenizer_name tokenizer_name_or_path tokenizer_type use_fast_tokenizer "
        "tokenizer_use_fast special_tokens eos_token pad_token bos_token tokens eot_tokens "
        "resize_vocab resize_token_embeddings resize_token_embeddings_to_32x "
        "added_tokens_overrides",
    ),
    (
        "conversations are printed by the chat template, tool calls in its form; a system text "
        "belongs into the rows (a message, or the column system)",
        "tool_format default_system_message default_system",
    ),
    (
        "no code of a model's folder is run: dense decoders of the Qwen2, Qwen3, Llama and "
        "Mistral families are trained from config.json, others with slidedp_jax.adapt",
        "trust_remote_code model_type type_of_model model_init_kwargs config_name",
    ),
    (
        "the hub is reached by huggingface_hub with its own settings (HF_TOKEN, HF_HOME, "
        "HF_HUB_OFFLINE); a revision: download it and give the folder",
        "cache_dir revision model_revision token hf_token use_auth_token hf_use_auth_token hf_*",
    ),
    (
        "training is what the command does; `dry_run` checks everything and stops",
        "do_train",
    ),
    (
        "the same command gives the same bits on the same devices",
        "full_determinism",
    ),
    (
        "metrics.jsonl in `output_dir` has tokens, tokens per second and memory of every step",
        "include_num_input_tokens_seen include_tokens_per_second "
        "include_effective_tokens_per_second skip_memory_metrics logging_nan_inf_filter",
    ),
    (
        "`dry_run` checks everything without training; `profile_steps` traces some steps",
        "debug",
    ),
    (
        "config.json of the model's folder decides; change it there",
        "rope_scaling rope_theta overrides_of_model_config",
    ),
    (
        "CPU and NVIDIA GPUs (`platform`)",
        "xla tpu tpu_num_cores",
    ),
    (
        "`max_steps` is of the whole run, and `num_train_epochs` may be a fraction",
        "max_steps_per_epoch",
    ),
)
"""First: why there is none of ours, or what to do. A star stands for the rest of a name."""


def _by_name(table: _Table) -> dict[str, str]:
    return {name: text for text, names in table for name in names.split()}


CALLED_HERE = _by_name(_CALLED)
"""A setting of another tool -> ours."""

ANSWERS = _by_name(_ANSWERS)
"""A setting of another tool -> why there is none of ours, or what to do."""

BEGINNINGS = {name[:-1]: text for name, text in ANSWERS.items() if name.endswith("*")}
"""How settings of other tools begin -> the same."""


def answer(name: str) -> str | None:
    """What to do about a setting of another tool that has no name here; None: it is not known.

    Args:
      name: with underscores, in lower case.
    """
    if (text := ANSWERS.get(name)) is not None:
        return text
    return next((text for begin, text in BEGINNINGS.items() if name.startswith(begin)), None)
