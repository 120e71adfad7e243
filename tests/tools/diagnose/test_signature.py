"""The signature tables: each matches its example, and the prefilter drops no line that a pattern matches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megads.tools.diagnose.causes import FACTS, Cause, Domain
from megads.tools.diagnose.decision import decide
from megads.tools.diagnose.evidence import survey_log
from megads.tools.diagnose.signature import Signature, SignatureTable, Strength, required_literals, signature_table

ALL = signature_table().signatures


@pytest.mark.parametrize("signature", [s for s in ALL if not s.frames], ids=lambda s: s.example[:40])
def test_every_signature_finds_its_example(signature: Signature) -> None:
    """Catches a pattern that does not match its example, and one hidden by a stronger signature of another cause."""
    found = signature_table().match(signature.example)
    assert found is not None and found.signature.cause == signature.cause


def test_every_cause_has_a_signature() -> None:
    """Catches a cause that no log can be diagnosed with."""
    assert {signature.cause for signature in ALL} == set(Cause) - {Cause.node_lost}
    assert set(FACTS) == set(Cause)
    assert all(isinstance(facts.domain, Domain) and facts.advice for facts in FACTS.values())


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("CUDA out of memory", ["CUDA out of memory"]),
        (r"exitcode *: -9\b", ["exitcode"]),
        ("colou?r of it", ["r of it"]),
        ("(?:error|failure) x", ["error", "failure"]),
        ("(?:error|failure)? of it", [" of it"]),
        ("one|another", []),
        (r"a{2,3}\d+", []),
        (r"x[abc](?:no|yes)", []),
        (r"\[Errno 5\]", ["[Errno 5]"]),
        ("(?!not this)", []),
    ],
)
def test_required_parts(pattern: str, parts: list[str]) -> None:
    """Catches a literal treated as required that is optional, repeated or one of several alternatives."""
    assert required_literals(pattern) == parts


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_line_is_dismissed_that_a_pattern_finds(data: st.DataObject) -> None:
    """Catches a required literal that some match of the pattern lacks, so that the prefilter drops its line."""
    pattern = data.draw(st.sampled_from([pattern for signature in ALL for pattern in signature.patterns]))
    alphabet = st.characters(max_codepoint=127, include_characters=pattern)
    line = data.draw(st.from_regex(re.compile(pattern, re.IGNORECASE), alphabet=alphabet))
    parts = required_literals(pattern)
    assert not parts or any(part.lower() in line.lower() for part in parts)


def signature(cause: Cause, strength: Strength, pattern: str, **fields: object) -> Signature:
    return Signature(cause, strength, (pattern,), "", **fields)  # type: ignore[arg-type]


def test_order_within_a_line() -> None:
    """Catches a weaker or general signature that hides a more specific one in the same line."""
    weak = signature(Cause.nccl_timeout_hang, Strength.cascade, "watchdog")
    strong = signature(Cause.cuda_oom, Strength.root, "out of memory")
    later = signature(Cause.host_oom_kill, Strength.root, "memory")
    general = signature(Cause.user_code_exception, Strength.root, "RuntimeError", fallback=True)
    table = SignatureTable((general, weak, strong, later))

    def cause(line: str) -> Cause | None:
        found = table.match(line)
        return found.signature.cause if found else None

    assert cause("watchdog: RuntimeError: out of memory") == Cause.cuda_oom
    assert cause("RuntimeError: watchdog") == Cause.nccl_timeout_hang
    assert cause("RuntimeError: 7") == Cause.user_code_exception
    assert cause("MEMORY") == Cause.host_oom_kill
    assert cause("all is well") is None


def test_frames_decide_for_general_exceptions_only() -> None:
    """Catches a traceback through the dataloader that attributes every error to the dataloader."""
    reset = signature(Cause.nccl_remote_or_network, Strength.cascade, "Connection reset")
    worker = signature(Cause.dataloader_worker_killed, Strength.failure, "Connection", frames="dataloader.py")
    full = signature(Cause.disk_full, Strength.root, "No space")
    table = SignatureTable((reset, full, worker))
    frames = '  File "torch/utils/data/dataloader.py", line 1, in get'
    found = [table.match("Connection reset by peer", at) for at in (frames, "")]
    assert [one.signature.cause for one in found if one] == [
        Cause.dataloader_worker_killed,
        Cause.nccl_remote_or_network,
    ]
    both = table.match("Connection: No space", frames)
    assert both is not None and both.signature.cause == Cause.disk_full


RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"


@pytest.mark.parametrize(
    ("frame", "error", "cause"),
    [
        ("torch/utils/data/dataloader.py", RESET, "dataloader_worker_killed"),
        ("site-packages/huggingface_hub/file_download.py", RESET, "aux_service_network"),
        ("site-packages/requests/adapters.py", "TimeoutError: timed out", "aux_service_network"),
        ("torch/distributed/rendezvous.py", "RuntimeError: connect() timed out.", "port_or_rendezvous"),
        ("megatron/training/arguments.py", "AssertionError: experts", "config_or_shape_error"),
        ("/data/mine/train.py", "AssertionError: experts", "user_code_exception"),
        ("/data/mine/train.py", "ValueError: bad", "user_code_exception"),
        ("site-packages/peft/tuners.py", "ValueError: bad", "config_or_shape_error"),
        ("torch/utils/cpp_extension.py", "subprocess.CalledProcessError: Command died", "import_or_build_error"),
    ],
)  # fmt: skip
def test_where_it_was_raised(frame: str, error: str, cause: str) -> None:
    """Catches a general exception that is diagnosed without its traceback."""
    frames = f'  File "main.py", line 1, in <module>\n    main()\n  File "{frame}", line 3, in get\n    x = y(z)\n'
    log = f"Traceback (most recent call last):\n{frames}{error}\n"
    assert decide([survey_log("job.log", [log.encode()])]).cause == cause


UNKNOWN, NETWORK = Cause.process_killed_unknown, Cause.nccl_remote_or_network
SETTING, BUILD = Cause.config_or_shape_error, Cause.import_or_build_error
NO_GPU, HANG = Cause.driver_mismatch_or_no_gpu, Cause.nccl_timeout_hang


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("assert self.profiler", Cause.user_code_exception),
        ("assert batch_size % world_size == 0", SETTING),
        ("assert x.shape[1] == y.shape[1]", SETTING),
        ("assert args.seq_length", SETTING),
    ],
)
def test_an_assertion_without_a_message(source: str, cause: Cause) -> None:
    """Catches an ignored source line that shows what is asserted: a division, a shape, a setting."""
    log = f'Traceback (most recent call last):\n  File "train.py", line 3, in check\n    {source}\nAssertionError\n'
    assert decide([survey_log("job.log", [log.encode()])]).cause == cause


@pytest.mark.parametrize(
    ("message", "cause", "restartable"),
    [
        ("Of this, 1.2 GiB is reserved by PyTorch but unallocated.", Cause.cuda_oom, False),
        ("[Rank 3] ProcessGroupNCCL preparing to dump debug info.", Cause.nccl_timeout_hang, True),
        ("Error merging override data.path", Cause.config_or_shape_error, False),
        (
            "watchdog thread terminated with exception:\nHIP error: invalid event",
            Cause.cuda_illegal_access,
            False,
        ),
        ("The detected CUDA version (12.8) mismatches that of PyTorch", Cause.import_or_build_error, False),
        ("Unable to determine the device handle for GPU1: 999", Cause.cuda_ecc_or_xid, True),
        ("TypeError: expected Tensor as element 2 in argument 1, but got int", Cause.user_code_exception, False),
        ("TypeError: collate: batch must contain tensors, arrays, dicts; got <U3", Cause.user_code_exception, False),
        ("ray.exceptions.RayTaskError(OutOfMemoryError): ray::Actor.step()", Cause.cuda_oom, False),
        ("ValueError: API key must be 40 characters long, yours was 3", Cause.aux_service_network, False),
        ("ImportError(\"cannot import name 'a' from 'b'\")\nAttributeError: no a", Cause.import_or_build_error, False),
        ("spawn.py:169] Terminating process 7 via signal SIGTERM", Cause.process_killed_unknown, False),
        ("loading:  50%|##   | 1/2 [00:09<00:09,  9.1s/it]Killed", Cause.process_killed_unknown, True),
        ("Getötet", Cause.process_killed_unknown, True),
        ("RuntimeError: inner\nEL0004: Failed to allocate memory.", Cause.cuda_oom, False),
        ("RuntimeError: inner\nrtMalloc execute failed, reason=[driver error:out of memory]", Cause.cuda_oom, False),
        ("RuntimeError: grad_scale is too small, exiting: 1e-10", Cause.nan_or_loss_divergence, False),
        ("RuntimeError: normal expects all elements of std >= 0.0", Cause.nan_or_loss_divergence, False),
        (
            "TypeError: weights in bfloat16, but you want float16. Set fp16 to `False` and bf16 to `True`",
            SETTING,
            False,
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'out/ckpt.pt'", SETTING, False),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'out/iter_0000100/mp_rank_03/model.pt'",
            Cause.checkpoint_corrupt_or_mismatch,
            False,
        ),
        ("bash: zeile 3: 77 Getötet  python train.py", Cause.process_killed_unknown, True),
        ("已杀死", Cause.process_killed_unknown, True),
        ("Child process with PID 9 terminated with code -9.\nTerminating all other processes", UNKNOWN, True),
        ("*** stack smashing detected ***: terminated", UNKNOWN, False),
        ("User defined signal 2", Cause.preempted_or_time_limit, True),
        ("srun: error: Task launch failed on node n1: Unable to satisfy cpu bind request", SETTING, False),
        ("RuntimeError: NCCL error in: NCCLUtils.hpp:82, invalid argument, NCCL version 2.4.8", SETTING, False),
        ("NotImplementedError: Pipeline parallelism with tied embeddings is not supported", SETTING, False),
        ("aclrtSynchronizeDevice, error code is 507046", Cause.nccl_timeout_hang, True),
        ("MPI_Init_thread failed", Cause.port_or_rendezvous, False),
        ("PMIX ERROR: ERROR in file gds_lock.c at line 169", Cause.port_or_rendezvous, False),
        ("CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.", BUILD, False),
        ("AttributeError: module 'torch.distributed' has no attribute 'device_mesh'", BUILD, False),
        ("node1:8:21 [2] include/alloc.h:48 NCCL WARN Cuda failure 'out of memory'", Cause.cuda_oom, False),
        ("HSA_STATUS_ERROR_EXCEPTION: a hardware exception. code: 0x1016", Cause.cuda_illegal_access, False),
        ("DeferredCudaCallError: device >= 0 && device < num_gpus ASSERT FAILED", NO_GPU, False),
        ("google.api_core.exceptions.Forbidden: no storage.objects.get access", Cause.aux_service_network, False),
        ("error: devices Does not validate against any of the Union subtypes", SETTING, False),
        ("ValueError: Default process group has not been initialized, please call init_process_group.", SETTING, False),
        ("OSError: Incorrect path_or_model_id: 'runs/a'", SETTING, False),
        ("RuntimeError: torch.nn.functional.binary_cross_entropy and BCELoss are unsafe to autocast.", SETTING, False),
        ("ValueError: too many values to unpack (expected 2)", Cause.user_code_exception, False),
        ("due to ProcessGroupNCCL watchdog hang.\nprocess 1 terminated with signal SIGABRT", HANG, True),
        ("RuntimeError: NPU function error, code 7\nEE1002: Stream synchronize timeout.", HANG, True),
        ("RuntimeError: NCCL Error 5: invalid usage", SETTING, False),
        ("ImportError: numpy.core.multiarray failed to import", BUILD, False),
        ("numpy.core.multiarray failed to import", BUILD, False),
        ("signal 10: the job is requeuing itself", Cause.preempted_or_time_limit, True),
        ("EI0002: the wait of the Notify register times out", Cause.nccl_timeout_hang, True),
        ("ray.exceptions.RaySystemError: Could not connect to GCS at 10.0.0.1:6379", Cause.port_or_rendezvous, True),
        ("pdsh@n1: n2: ssh exited with exit code 255", Cause.port_or_rendezvous, True),
        ("Killing subprocess 190\npdsh@n1: n2: ssh exited with exit code 247", UNKNOWN, False),
        ("srun: error: CPU binding outside of job step allocation", SETTING, False),
        ("store->get('0') got error: failed to recv, got 0 bytes\nRank 3 crashed with exit code 1", NETWORK, True),
    ],
)
def test_messages_that_say_one_thing(message: str, cause: Cause, restartable: bool) -> None:
    """Catches a wrong diagnosis of a message of torch, NVIDIA's tools, Hydra or a shell in another language."""
    found = decide([survey_log("job.log", [f"step 3 loss 2.0\n{message}\n".encode()])])
    assert (found.cause, found.restartable) == (cause, restartable)


WRONG_TODAY = {
    "m021", "m040", "m088", "c002", "c018", "c023", "c038", "d006", "d010", "d011", "d041", "e002", "e003",
    "e007", "e047", "f009", "p064", "p066", "p069", "p094", "p098", "p119", "q019", "r011", "t003", "t012",
    "t033", "t061", "u023", "u024", "u029", "u033", "v028", "v067", "v079", "v091", "p8_025", "p8_039",
    "p8_057",
}  # fmt: skip
"""Messages of lots.yaml that are diagnosed with a wrong cause: known weaknesses, not accepted behavior."""


@pytest.mark.slow
def test_lots_of_labelled_messages() -> None:
    """Catches a change that helps one message but harms others, and an improvement that is not recorded here."""
    wrong, wrong_restart = set(), set()
    for case in yaml.safe_load((Path(__file__).parent / "lots.yaml").read_text()):
        found = decide([survey_log("job.log", ["\n".join(case["lines"]).encode()])])
        if found.cause != case["cause"]:
            wrong.add(case["name"])
        if found.restartable != case["restartable"]:
            wrong_restart.add(case["name"])
    assert wrong == WRONG_TODAY
    assert wrong_restart == {"m021", "a061", "c038", "d006", "d030", "e002", "e007", "f009", "t061", "v067"}
