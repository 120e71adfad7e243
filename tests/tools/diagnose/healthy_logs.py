"""Logs of runs without a failure, in the styles of other trainers, with the warnings that they usually print."""

from __future__ import annotations

from collections.abc import Callable

# ruff: noqa: E501 (lines as the trainers print them)


def megatron(steps: int) -> str:
    """Megatron-LM: a new run that warns about a missing checkpoint, then iterations and a save."""
    head = """\
using world size: 8, data-parallel size: 4, context-parallel size: 1, tensor-model-parallel size: 2
WARNING: Setting args.overlap_p2p_comm and args.align_param_gather to False since non-interleaved schedule does not
  log_num_zeros_in_grad ........................... False
  exit_on_missing_checkpoint ...................... False
  distributed_timeout_minutes ..................... 10
  error_injection_rate ............................ 0
  nccl_communicator_config_path ................... None
  no_load_optim ................................... None
> initializing torch distributed ...
[W socket.cpp:697] [c10d] The client socket cannot be initialized to connect to [n1]:29500 (errno: 97 - Address family
not supported by protocol).
WARNING: could not find the metadata file /checkpoints/gpt/latest_checkpointed_iteration.txt
    will not load any checkpoints and will start from random
(min, max) time across ranks (ms):
    load-checkpoint ................................: (0.45, 0.49)
WARNING:megatron.core.datasets.gpt_dataset:Unable to save the GPTDataset indexes because path_to_cache is None
done with setup ...
training ...
Number of parameters in transformer layers in billions:  0.30
"""
    lines = [
        f" [2024-05-01 10:{i // 6 % 60:02d}:{i % 6 * 10:02d}] iteration {i:8d}/    5000 | consumed samples: {8 * i:12d} | "
        f"elapsed time per iteration (ms): 9873.2 | learning rate: 1.500000E-04 | global batch size: 8 | "
        f"lm loss: {10 / (1 + i / 100):.6E} | loss scale: 1.0 | grad norm: 1.215 | num zeros: 0 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
        for i in range(1, steps + 1)
    ]
    return head + "\n".join(lines) + "\n"


def megatron_finished(steps: int) -> str:
    """Megatron-LM at the end of its iterations."""
    return megatron(steps) + (
        "saving checkpoint at iteration     200 to /checkpoints/gpt in torch_dist format\n"
        "  successfully saved checkpoint from iteration     200 to /checkpoints/gpt [ t 1/2, p 1/1 ]\n"
        "[after training is done] datetime: 2024-05-01 10:40:12\n"
        "validation loss at iteration 200 on test set | lm loss value: 3.1E+00 | lm loss PPL: 2.2E+01 |\n"
    )


def torchtitan(steps: int) -> str:
    """torchtitan, with torchrun's prefixes and its usual warnings."""
    head = """\
W0612 09:11:02.312000 140 torch/distributed/run.py:793] *****************************************
W0612 09:11:02.312000 140 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process \
to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance
[rank0]:[titan] 2025-06-12 09:11:09,871 - root - INFO - Starting job: Llama 3 8B training
[rank0]:[titan] 2025-06-12 09:11:10,713 - root - WARNING - ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = 1 will be overridden \
to 3 based on job config
[rank0]:[titan] 2025-06-12 09:11:10,720 - root - INFO - Building 1-D device mesh with ['dp_shard'], [8]
[rank0]:[titan] 2025-06-12 09:11:12,002 - root - INFO - Peak FLOPS used for computing MFU: 9.890e+14
[rank0]:[titan] 2025-06-12 09:11:20,400 - root - WARNING - 1 CUDA memory allocation retries.
[rank0]:[titan] 2025-06-12 09:11:20,500 - root - INFO - Trainer is initialized with local batch size 1
[rank0]:[titan] 2025-06-12 09:11:20,501 - root - INFO - Training starts at step 1
"""
    lines = [
        f"[rank0]:[titan] 2025-06-12 09:{12 + i // 60 % 40:02d}:{i % 60:02d},000 - root - INFO - step: {i:2d}  loss: "
        f"{12 / (1 + i / 50):7.4f}  grad_norm:  1.51  memory: 50.1GiB(63.3%)  tps: 5,761  tflops: 333.6  mfu: 33.74%"
        for i in range(1, steps + 1)
    ]
    return head + "\n".join(lines) + "\n"


def torchtitan_finished(steps: int) -> str:
    """torchtitan at its end."""
    return torchtitan(steps) + (
        "[rank0]:[titan] 2025-06-12 09:55:02,000 - root - INFO - Sleeping 2 seconds for other ranks to complete\n"
        "[rank0]:[titan] 2025-06-12 09:55:04,000 - root - INFO - Training completed\n"
        "[rank0]:[titan] 2025-06-12 09:55:04,500 - root - INFO - Process group destroyed\n"
    )


def nanotron(steps: int) -> str:
    """nanotron."""
    head = """\
07/12/2024 10:02:11 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: Config:
07/12/2024 10:02:11 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]:        resume_checkpoint_path=None,
07/12/2024 10:02:12 [WARNING|DP=0|PP=0|TP=0|ip-26-0-160-225]: Vocab size of model (50257) is not divisible by 2
07/12/2024 10:02:14 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: No checkpoint path provided.
/env/lib/python3.10/site-packages/torch/autograd/graph.py:744: UserWarning: c10d::allreduce_: an autograd kernel was \
not registered to the Autograd key(s) but we are trying to backprop through it. This may lead to silently incorrect \
behavior.
07/12/2024 10:02:20 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: [Start training] datetime: 2024-07-12 10:02:20 | mbs: 4
"""
    lines = [
        f"07/12/2024 10:{3 + i // 30:02d}:{i % 30 * 2:02d} [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: iteration: {i} / 2000 | "
        f"consumed_tokens: {262 * i}K | elapsed_time_per_iteration_ms: 2.01K | tokens_per_sec: 130K | "
        f"global_batch_size: 128 | lm_loss: {11 / (1 + i / 60):.3g} | lr: 0.0003 | model_tflops_per_gpu: 150 | grad_norm: 1.2"
        for i in range(1, steps + 1)
    ]
    return head + "\n".join(lines) + "\n"


def hugging_face(steps: int) -> str:
    """transformers' Trainer, with the weights' usual warning and a retried download."""
    head = """\
Some weights of LlamaForSequenceClassification were not initialized from the model checkpoint at meta-llama/Llama-2-7b-hf \
and are newly initialized: ['score.weight']
You should probably TRAIN this model on a down-stream task to be able to use it for predictions and inference.
'(ReadTimeoutError("HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10)"), \
'(Request ID: 1)')' thrown while requesting HEAD https://huggingface.co/x/resolve/main/tokenizer_config.json
Retrying in 1s [Retry 1/5].
/env/lib/python3.11/site-packages/torch/utils/checkpoint.py:464: UserWarning: torch.utils.checkpoint: the use_reentrant \
parameter should be passed explicitly. In version 2.4 we will raise an exception if use_reentrant is not passed.
  warnings.warn(
Detected kernel version 4.18.0, which is below the recommended minimum of 5.5.0; this can cause the process to hang. It \
is recommended to upgrade the kernel to the minimum version or higher.
***** Running training *****
  Num examples = 52,002
`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.
"""
    lines = [
        f"{{'loss': {4 / (1 + i / 40):.4f}, 'grad_norm': 1.31, 'learning_rate': 2e-05, 'epoch': {i / 100:.2f}}}"
        for i in range(1, steps + 1)
    ]
    return head + "\n".join(lines) + "\n"


def hugging_face_finished(steps: int) -> str:
    """transformers' Trainer at its end."""
    return hugging_face(steps) + (
        "\n\nTraining completed. Do not forget to share your model on huggingface.co/models =)\n\n\n"
        "{'train_runtime': 912.1, 'train_samples_per_second': 57.01, 'train_loss': 1.9, 'epoch': 3.0}\n"
        "Saving model checkpoint to out\n"
    )


def lightning(steps: int) -> str:
    """Lightning, with progress bars and its advice about dataloader workers."""
    head = """\
GPU available: True (cuda), used: True
TPU available: False, using: 0 TPU cores
/env/lib/python3.10/site-packages/pytorch_lightning/trainer/connectors/data_connector.py:441: The 'train_dataloader' \
does not have many workers which may be a bottleneck. Consider increasing the value of the `num_workers` argument
Missing logger folder: /data/lightning_logs
LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1,2,3]
  | Name  | Type | Params
"""
    lines = [
        f"Epoch 0:  {i // 10:2d}%|██        | {i}/1000 [00:{i % 60:02d}<10:12,  1.61it/s, v_num=3, train_loss={3 / i:.3f}]"
        for i in range(1, steps + 1)
    ]
    return head + "\n".join(lines) + "\n"


def lightning_finished(steps: int) -> str:
    """Lightning at its end."""
    return lightning(steps) + "`Trainer.fit` stopped: `max_epochs=1` reached.\n"


def deepspeed(steps: int) -> str:
    """DeepSpeed's launcher and engine, with fp16 overflows at the start."""
    head = """\
[2023-08-01 12:00:00,100] [WARNING] [runner.py:196:fetch_hostfile] Unable to find hostfile, will proceed with training \
with local resources only.
[2023-08-01 12:00:04,100] [INFO] [launch.py:138:main] nnodes=1, num_local_procs=8, node_rank=0
[2023-08-01 12:00:20,100] [WARNING] [config_utils.py:69:_process_deprecated_field] Config parameter \
cpu_offload is deprecated use offload_optimizer instead
[2023-08-01 12:01:00,100] [INFO] [loss_scaler.py:180:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. \
Attempted loss scale: 4294967296, reducing to 2147483648
"""
    lines = [
        f"[2023-08-01 12:{2 + i // 60:02d}:{i % 60:02d},100] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=1, "
        "lr=[0.0001], mom=[(0.9, 0.95)]"
        for i in range(1, steps + 1)
    ]
    done = "[2023-08-01 13:10:00,100] [INFO] [launch.py:351:main] Process 4242 exits successfully.\n"
    return head + "\n".join(lines) + "\n" + done


def settings(steps: int) -> str:
    """Arguments, a config and an environment, as many programs print them first; their names sound like failures."""
    head = """\
  error_injection_type ............................ transient_error
  check_for_nan_in_loss_and_grad .................. True
  distributed_timeout_minutes ..................... 10
  skipped_train_samples ........................... 0
cluster:
  requeue: true
  on_failure: raise
  preempted: false
  nccl_timeout: 1800
NCCL_IB_TIMEOUT=22
TORCH_NCCL_ASYNC_ERROR_HANDLING=1
TCPStore server listening on port 29500
Setting rerun_state_machine.current_iteration to 0...
"""
    return head + "".join(f"step {i} loss {3 / i:.3f}\n" for i in range(1, steps + 1))


TRAINING: dict[str, Callable[[int], str]] = {
    "Megatron-LM": megatron,
    "torchtitan": torchtitan,
    "nanotron": nanotron,
    "HF Trainer": hugging_face,
    "Lightning": lightning,
    "settings": settings,
}
"""Logs that end while the run trains."""
FINISHED: dict[str, Callable[[int], str]] = {
    "Megatron-LM": megatron_finished,
    "torchtitan": torchtitan_finished,
    "HF Trainer": hugging_face_finished,
    "Lightning": lightning_finished,
    "DeepSpeed": deepspeed,
}
"""Logs whose end says that the training is over."""
