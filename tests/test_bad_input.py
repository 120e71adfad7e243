"""A user's mistake gives one message and the documented exit code, never a traceback, and changes no files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megads.data.indexed.dataset import HEADER, bin_path, idx_path
from tests.command import StartCommand, small_model, steps_of
from tests.corpus import VOCAB_SIZE
from tests.fork_server import ForkServer, Outcome


@dataclass(frozen=True)
class Forked:
    """Runs `megads` commands in a folder, forked from a process that has imported everything."""

    folder: Path
    server: ForkServer

    def __call__(self, *arguments: str) -> Outcome:
        return self.server(self.folder, arguments)


@pytest.fixture
def forked(tmp_path: Path, fork_server: ForkServer) -> Forked:
    return Forked(tmp_path, fork_server)


def refused(ended: Outcome, code: int, *texts: str) -> None:
    """Checks a command that must fail with one message; one line that names a long phase may precede it."""
    assert ended.code == code, ended
    for text in texts:
        assert text in ended.err, ended.err
    assert "Traceback" not in ended.err + ended.out
    *phases, message = ended.err.splitlines()
    assert message.startswith("megads ") and len(phases) <= 1 and "megads" not in "".join(phases), ended.err


BAD_CONFIGS = {
    "misspelt key": (["model.num_layer=3"], ["unknown key model.num_layer: did you mean model.num_layers?"]),
    "wrong type": (["model.num_layers=many"], ["model.num_layers", "'many'", "expected an integer"]),
    "fraction for an integer": (["train.seq_len=16.5"], ["train.seq_len", "16.5", "expected an integer"]),
    "unknown precision": (["train.precision=fp8"], ["train.precision", "fp8", "bf16, fp32"]),
    "fp16": (["train.precision=fp16"], ["train.precision", "fp16 is not supported", "loss scaling", "use bf16"]),
    "unknown group option": (["model=tinny"], ["model=tinny: there is no such option: did you mean tiny?"]),
    "copies of no local checkpoints": (
        ["checkpoint.replicate=true"],
        ["checkpoint.replicate = true", "set checkpoint.local_every_steps"],
    ),
    "copies on no other node": (
        ["checkpoint.replicate=true", "checkpoint.local_every_steps=5"],
        ["all ranks are on one node", "set checkpoint.replicate=false"],
    ),
    "heads over tp": (["parallel.tp=4"], ["model.num_heads = 6", "parallel.tp = 4"]),
    "heads over ulysses": (
        ["parallel.cp=4", "parallel.cp_kind=ulysses", "train.seq_len=16"],
        ["parallel.cp_kind = ulysses divides the heads", "6, over parallel.cp = 4", "use parallel.cp_kind=allgather"],
    ),
    "heads over some of the context ranks": (
        ["parallel.cp=8", "parallel.cp_ulysses=4", "train.seq_len=16"],
        [
            "parallel.cp_ulysses = 4 divides the heads",
            "6, over 4 ranks",
            "a divisor of both 6 and parallel.cp = 8: 1, 2",
        ],
    ),
    "context ranks over their groups": (
        ["parallel.cp=4", "parallel.cp_kind=ring", "parallel.cp_ulysses=3", "train.seq_len=16"],
        ["parallel.cp_ulysses = 3 does not divide parallel.cp = 4", "use one of 1, 2, 4"],
    ),
    "heads exchanged twice": (
        ["parallel.cp=4", "parallel.cp_kind=ulysses", "parallel.cp_ulysses=2", "train.seq_len=16"],
        ["parallel.cp_ulysses = 2 with parallel.cp_kind = ulysses", "set parallel.cp_kind to allgather or ring"],
    ),
    "a kernel for all keys in a ring": (
        ["parallel.cp=2", "parallel.cp_kind=ring", "train.seq_len=16", "model.attention=fused_softmax"],
        [
            "model.attention = fused_softmax",
            "parallel.cp_kind = ring combines blocks of keys",
            "use model.attention=auto",
        ],
    ),
    "the ring by Megatron's name": (["parallel.cp_kind=p2p"], ["parallel.cp_kind", "use ring"]),
    "two levels by Megatron's name": (["parallel.cp_kind=a2a+p2p"], ["use ring with parallel.cp_ulysses"]),
    "heads over hidden": (["model.num_heads=5"], ["model.hidden_size = 48", "model.num_heads = 5"]),
    "batch over dp": (["parallel.dp=5"], ["train.global_batch_size = 12", "* parallel.dp = 2 * 5 = 10"]),
    "steps in words": (["train.steps=many"], ["train.steps = many: must be an integer or auto"]),
    "auto and passes": (["train.steps=auto", "train.epochs=2"], ["train.steps = auto, train.epochs = 2"]),
    "no pass": (["train.steps=null", "train.epochs=0"], ["train.epochs = 0", "must be above 0"]),
    "FP8 by habit": (["train.fp8=true"], ["train.fp8", "tensorwise or rowwise"]),
    "FP8 of former steps": (["train.fp8=delayed"], ["train.fp8", "scales of earlier steps"]),
    "FP8 nowhere": (
        ["train.fp8=rowwise", "train.fp8_bf16_blocks=9"],
        ["train.fp8_bf16_blocks = 9", "lower train.fp8_bf16_blocks"],
    ),
    "FP8 in parts": (
        ["train.fp8=rowwise", "model.num_layers=3", "parallel.tp=2", "parallel.tp_chunks=2"],
        ["train.fp8 = rowwise is not supported with parallel.tp_chunks = 2", "set parallel.tp_chunks=1"],
    ),
    "FP8 whose weights arrive late": (
        ["train.fp8=rowwise", "model.num_layers=3", "parallel.dp=2", "parallel.overlap_param_gather=true"],
        [
            "train.fp8 = rowwise is not supported with parallel.overlap_param_gather = true",
            "overlap_param_gather=false",
        ],
    ),
    "FP8 in CUDA graphs": (
        ["train.fp8=rowwise", "model.num_layers=3", "ops.cuda_graphs=true"],
        [
            "train.fp8 = rowwise is not supported with ops.cuda_graphs = true",
            "set ops.cuda_graphs=false, or use train.fp8=none",
        ],
    ),
    "FP8 of chunks": (
        ["train.fp8=tensorwise", "model.num_layers=3", "ops.mlp_chunk=8"],
        [
            "ops.mlp_chunk = 8 is not supported with train.fp8 = tensorwise",
            "use train.fp8=none, or remove ops.mlp_chunk",
        ],
    ),
    "FP8 with ZeRO-2": (
        ["train.fp8=tensorwise", "model.num_layers=3", "parallel.dp=2", "parallel.zero_stage=2"],
        ["train.fp8 = tensorwise is not supported", "use train.fp8=none"],
    ),
    "no data": (["data.train=[]"], ["data.train has 0 datasets"]),
    "apex on a CPU": (["ops.impl=apex"], ["ops.impl = apex cannot run", "GPUs only", "use ops.impl=auto"]),
}


EXPERTS = ("model.bias=false", "model.moe.expert_ffn_size=24", "model.moe.num_experts=4")
BAD_EXPERTS = {
    "experts over ep": (
        ["model.moe.num_experts=5", "parallel.dp=2", "parallel.ep=2"],
        ["model.moe.num_experts = 5 is not divisible by parallel.ep = 2", "choose a divisor"],
    ),
    "too many choices": (["model.moe.top_k=5"], ["top_k = 5 is above model.moe.num_experts = 4", "lower top_k"]),
    "ranks over ep": (
        ["parallel.dp=2", "parallel.ep=4"],
        ["parallel.ep = 4 does not divide parallel.cp * dp = 2", "choose a divisor"],
    ),
    "ranks over ep, whole experts": (
        ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.expert_tp=false", "parallel.ep=4"],
        ["parallel.ep = 4 does not divide parallel.tp * cp * dp = 2"],
    ),
    "whole experts without sequence parallelism": (
        ["parallel.tp=2", "parallel.expert_tp=false"],
        ["parallel.expert_tp = false requires parallel.sequence_parallel = true", "expert_tp=true"],
    ),
    "ep without experts": (
        ["model.moe.num_experts=0", "model.moe.expert_ffn_size=null", "parallel.dp=2", "parallel.ep=2"],
        ["parallel.ep = 2 is about experts, but model.moe.num_experts = 0", "remove it"],
    ),
    "settings without experts": (
        ["model.moe.num_experts=0"],
        ["model.moe only applies with model.moe.num_experts above 0, which is 0"],
    ),
    "features over tp": (
        ["model.moe.expert_ffn_size=25", "parallel.tp=2"],
        ["model.moe.expert_ffn_size = 25 is not divisible by parallel.tp = 2", "parallel.expert_tp=false"],
    ),
    "experts in CUDA graphs": (["ops.cuda_graphs=true"], ["no capacity", "set model.moe.capacity_factor"]),
    "divided experts in CUDA graphs": (
        ["parallel.dp=2", "parallel.ep=2", "ops.cuda_graphs=true", "model.moe.capacity_factor=2"],
        ["ops.cuda_graphs = true is not supported with parallel.ep = 2"],
    ),
    "dropping parts of samples": (
        ["parallel.cp=2", "model.moe.capacity_factor=1.25", "model.moe.overflow=drop"],
        ["model.moe.overflow = drop is not supported with parallel.cp = 2", "use model.moe.overflow=recompute"],
    ),
    "too little capacity": (["model.moe.capacity_factor=0.5"], ["capacity_factor = 0.5 is below 1", "overflow=drop"]),
    "experts in FP8": (
        ["train.fp8=tensorwise", "model.num_layers=3"],
        ["train.fp8 = tensorwise is not supported with model.moe.num_experts = 4", "no FP8; use train.fp8=none"],
    ),
    "experts with DeepSpeed": (["engine=deepspeed"], ["engine = deepspeed", "model.moe.num_experts = 4"]),
    "experts with ZeRO-2": (["parallel.dp=2", "parallel.zero_stage=2"], ["zero_stage", "model.moe.num_experts = 4"]),
    "experts with ZeRO-3": (["parallel.dp=2", "parallel.zero_stage=3"], ["zero_stage", "model.moe.num_experts = 4"]),
    "experts in a parallel block": (
        ["model.parallel_block=true"],
        ["model.parallel_block = true cannot be combined with model.moe.num_experts = 4"],
    ),
    "experts with biases": (["model.bias=true"], ["experts have no biases", "set model.mlp_bias=false"]),
}


# Both verbs call the same checks.
@pytest.mark.quick(*(f"{case}-train" for case in BAD_EXPERTS), "experts over ep-plan", "experts in FP8-plan")
@pytest.mark.parametrize("verb", ["train", "plan"])
@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_bad_experts_are_refused_before_ranks_start(case: str, verb: str, corpus: Path, forked: Forked) -> None:
    """Catches a layout that experts do not divide over, and a feature that experts do not have, which start ranks, are
    planned, or are refused without value and remedy."""
    overrides, texts = BAD_EXPERTS[case]
    refused(forked(verb, *small_model(corpus, train__steps=4), *EXPERTS, *overrides), 2, *texts)
    assert not (forked.folder / "runs").exists()


@pytest.mark.quick(
    "misspelt key",
    "wrong type",
    "unknown group option",
    "copies on no other node",
    "heads over tp",
    "batch over dp",
    "auto and passes",
    "no data",
    "apex on a CPU",
)
@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_refused_before_ranks_start(case: str, corpus: Path, forked: Forked) -> None:
    """Catches a bad config that starts ranks, is silently ignored, or is refused without value and remedy."""
    overrides, texts = BAD_CONFIGS[case]
    refused(forked("train", *small_model(corpus, train__steps=4), *overrides), 2, *texts)
    assert not (forked.folder / "runs").exists()


@pytest.mark.parametrize("verb", ["tokenizer", "preprocess"])
def test_an_empty_corpus_is_refused_by_every_verb(verb: str, forked: Forked) -> None:
    """Catches a tokenizer trained on no text, and an empty dataset that only training refuses."""
    empty, blank = forked.folder / "empty.jsonl", forked.folder / "blank.jsonl"
    empty.touch()
    blank.write_text('{"text": ""}\n{"text": ""}\n')
    tokenizer = []
    if verb == "preprocess":
        text = forked.folder / "words.txt"
        text.write_text("some words to learn from, some words to learn\n" * 20)
        trained = forked("tokenizer", f"input=[{text}]", "output=tokenizer.json", "vocab_size=300")
        assert trained.code == 0, trained.err
        tokenizer = ["tokenizer=tokenizer.json"]
    for path in (empty, blank):
        refused(forked(verb, f"input=[{path}]", "output=out", *tokenizer), 3)
    refused(forked(verb, "input=[missing.jsonl]", "output=out", *tokenizer), 3, "missing.jsonl")
    assert [path.name for path in forked.folder.glob("out*")] == []


def _remove_bin(prefix: Path) -> None:
    bin_path(prefix).unlink()


def _flip_magic(prefix: Path) -> None:
    content = bytearray(idx_path(prefix).read_bytes())
    content[2] ^= 1
    idx_path(prefix).write_bytes(content)


def _truncate_index(prefix: Path) -> None:
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes()[:-20])


def _truncate_header(prefix: Path) -> None:
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes()[: HEADER.size - 3])


def _truncate_tokens(prefix: Path) -> None:
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-2])


def _point_elsewhere(prefix: Path) -> None:
    content = bytearray(idx_path(prefix).read_bytes())
    sequences = (len(content) - HEADER.size - 8) // 20
    content[HEADER.size + 4 * sequences + 8 * 5] ^= 2
    idx_path(prefix).write_bytes(content)


def _claim_a_larger_vocabulary(prefix: Path) -> None:
    documents, tokens = _counts(prefix)
    record = {
        "tokenizer_sha256": "0" * 64, "vocab_size": 600, "max_token_id": 599, "end_of_document_id": None,
        "documents": documents, "tokens": tokens, "text_bytes": 1, "rejected_lines": 0, "rejected_reasons": {},
        "rejected_examples": [], "input_files": [], "format_version": 1,
    }  # fmt: skip
    Path(f"{prefix}.json").write_text(json.dumps(record))


def _counts(prefix: Path) -> tuple[int, int]:
    sequences = (idx_path(prefix).stat().st_size - HEADER.size - 8) // 20
    return sequences, bin_path(prefix).stat().st_size // 2


BAD_DATA: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing tokens": (_remove_bin, ["data.bin: no such file", "megads preprocess"]),
    "flipped magic": (_flip_magic, ["data.idx: byte 0: magic b'MMHDIDX"]),
    "truncated index": (_truncate_index, ["data.idx: byte 18: ", "it is truncated or the counts are wrong"]),
    "truncated header": (_truncate_header, ["data.idx: byte 31: the file ends inside its header"]),
    "truncated tokens": (_truncate_tokens, ["data.bin: has ", "one is truncated"]),
    "wrong pointer": (_point_elsewhere, ["sequence 5 starts at byte"]),
    "vocabulary": (
        _claim_a_larger_vocabulary,
        ["largest token is 599", f"model.vocab_size is {VOCAB_SIZE}", "set model.vocab_size=600"],
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_damaged_data_are_refused_by_the_launcher(case: str, corpus: Path, forked: Forked) -> None:
    """Catches training on damaged data, and damage that shows only after all ranks start: the launcher must check."""
    prefix = forked.folder / "data"
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus}{ending}", f"{prefix}{ending}")
    spoil, texts = BAD_DATA[case]
    spoil(prefix)
    refused(forked("train", *small_model(prefix, train__steps=4)), 3, *texts)
    assert not (forked.folder / "runs").exists()


def test_missing_data_leave_no_run_directory(forked: Forked) -> None:
    """Catches a run directory that is made for a mistyped path."""
    refused(
        forked("train", *small_model(Path("no/such/corpus"), train__steps=4)), 3, "no/such/corpus.idx: no such file"
    )
    assert not (forked.folder / "runs").exists()


def test_missing_validation_data_are_refused_before_training(corpus: Path, forked: Forked) -> None:
    """Catches missing validation data that is detected only after training has begun."""
    overrides = small_model(corpus, train__steps=4, data__valid="no/such/corpus")
    refused(forked("train", *overrides), 3, "no/such/corpus.idx: no such file")


def test_an_unwritable_run_directory_is_refused(corpus: Path, forked: Forked) -> None:
    """Catches a traceback from the first file that is written. A path through a file fails even for root."""
    (forked.folder / "file").write_text("kept")
    run_dir = forked.folder / "file" / "run"
    refused(
        forked("train", *small_model(corpus, train__steps=4, run__dir=run_dir)), 2,
        f"the run directory {run_dir} cannot be written to", "Not a directory", "run.dir=<path>",
    )  # fmt: skip
    assert (forked.folder / "file").read_text() == "kept"


@pytest.mark.distributed
def test_a_missing_checkpoint_is_refused(corpus: Path, megads: StartCommand) -> None:
    """Catches a mistyped checkpoint.load that silently starts from random weights."""
    overrides = small_model(corpus, train__steps=4, checkpoint__load="no/such/run", run__dir="run")
    ended = megads("train", *overrides).end()
    assert ended.code == 4
    assert "checkpoint.load = no/such/run: there is no such folder" in ended.err
    assert "Traceback" not in ended.err
    assert steps_of(megads.folder / "run") == []


@pytest.mark.fault(15)
@pytest.mark.quick(".bin-20")
@pytest.mark.distributed
@pytest.mark.parametrize(("ending", "left"), [(".bin", 20), (".idx", 0)])
def test_a_file_truncated_during_a_run_is_named(ending: str, left: int, corpus: Path, megads: StartCommand) -> None:
    """Catches training on the zeros of a truncated page, and a bare SIGBUS: the kernel kills a process that reads a
    mapped file beyond its end, and no rank can report why it died."""
    prefix, run_dir = megads.folder / "data", megads.folder / "run"
    for name in (".bin", ".idx"):
        shutil.copy(f"{corpus}{name}", f"{prefix}{name}")
    command = megads("train", *small_model(prefix, train__steps=1000000, run__dir=run_dir))
    command.wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(steps_of(run_dir)) > 1)
    with Path(f"{prefix}{ending}").open("r+b") as file:
        file.truncate(left)
    ended = command.end()
    # A truncated .bin is detected before it is read; a truncated .idx raises SIGBUS, which the launcher explains.
    assert ended.code == 3 and f"{prefix}{ending}: " in ended.err, ended
    assert "truncated while it was read" in ended.err or "cause: " in ended.err, ended
