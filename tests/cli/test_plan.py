"""`megads plan`, and the refusal of runs that do not fit in memory."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import psutil
import pytest

from megads.cli.main import run
from megads.model.config import ModelConfig
from megads.model.model_size import parameter_count
from megads.runtime.machine_memory import HEAP_SHARE, PROCESS_BYTES

DATA = "data.train=[{path: nowhere}]"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.always
def test_plan_needs_no_data_and_its_table_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan that requires data or a number of steps, and a table with a missing part."""
    assert run(["plan", "experiment=bloom_176b", "device=cuda"]) == 0
    out = capsys.readouterr().out
    for expected in ("176,247,271,424 parameters", "384 ranks", "256 micro-batches", "bubble 4.1%", "peak: rank 0"):
        assert expected in out
    assert len(re.findall(r"^ +\d+ +\d+,\d+.* [56] of [56] full ", out, re.MULTILINE)) == 12, "one row a stage"
    assert "1.436e+12 hardware FLOPs a token including recomputation, +32.7%" in out
    assert re.search(r"a GPU 38\.0 GiB of 79\.0 GiB available: fits", out), "the published layout ran on such GPUs"
    assert not list(Path().iterdir())


def test_plan_counts_a_chunked_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan that ignores ops.loss_chunk and so refuses runs that fit."""
    peaks = []
    for chunk in (64, 100_000):
        assert run(["plan", "model=bloom_560m", "device=cuda", "json=true", f"ops.loss_chunk={chunk}"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["stages"][0]["peak"])
    assert peaks[0] < peaks[1]


GROUPS = "optim.groups=[{pattern: '*.mlp.*', lr_scale: 0.5}, {pattern: '*.mlp.*.weight', weight_decay: 0.2}]"


def test_parameter_groups_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a table that omits a parameter or shows the learning rate or weight decay of another group, and a plan
    that accepts a pattern that matches no parameter."""
    model = ["model.num_layers=2", "model.hidden_size=64", "model.vocab_size=512", "optim.lr=0.01"]
    assert run(["plan", *model, GROUPS, "device=cpu", "json=true"]) == 0
    groups = json.loads(capsys.readouterr().out)["parameter_groups"]
    assert sum(group["elements"] for group in groups) == parameter_count(ModelConfig(2, 64, vocab_size=512))
    rates = [(len(g["patterns"]), len(g["parameters"]), g["peak_lr"], g["weight_decay"]) for g in groups]
    assert sorted(rates) == [(0, 5, 0.01, 0.1), (0, 16, 0.01, 0.0), (1, 4, 0.005, 0.0), (2, 4, 0.005, 0.2)]
    train = ["train", "train.steps=1", *model, DATA, "run.dry_run=true"]
    for command in (["plan", *model, "device=cpu"], train):
        assert run([*command, GROUPS]) == 0
        assert re.search(
            r"\*\.mlp\.\* then \*\.mlp\.\*\.weight +4 +65,536 +0\.005 +0\.5 +0\.2", capsys.readouterr().out
        )
        assert run([*command, "optim.groups=[{pattern: mlp, lr_scale: 2}]"]) == 2
        assert "optim.groups[0].pattern = 'mlp' matches no parameter" in capsys.readouterr().err


def test_auto_recomputes_what_a_gpu_has_no_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches recomputation that does not fit or is too much, and auto for a GPU of unknown memory size."""
    bloom = ["plan", "experiment=bloom_176b", "device=cuda", "cluster.gpu_memory_gib=60", "json=true"]
    assert run([*bloom, "parallel.recompute=auto"]) == 0
    plan = json.loads(capsys.readouterr().out)
    blocks = [stage["recomputation"].count("full") for stage in plan["stages"]]
    assert plan["machine"]["fits"] and 0 < sum(blocks) < 70 and blocks[1:] == sorted(blocks[1:], reverse=True)
    for stage in (0, 11):
        fewer = [max(0, n - (s == stage)) for s, n in enumerate(blocks)]
        assert run([*bloom, f"parallel.recompute_blocks={fewer}".replace(" ", "")]) == 0
        assert json.loads(capsys.readouterr().out)["machine"]["fits"] == (blocks[stage] == 0)
    assert run([*bloom, "parallel.recompute=auto", "cluster.gpu_memory_gib=null"]) == 2
    assert "set cluster.gpu_memory_gib" in capsys.readouterr().err


@pytest.mark.always
def test_plan_as_json_has_parts_that_add_up_to_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches invalid JSON, parts that do not add up to the peak, and a wrong total over ranks."""
    overrides = [
        "model=demo",
        "model.vocab_size=8192",
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.dp=2",
        "train.seq_len=256",
        "device=cpu",
    ]
    assert run(["plan", *overrides, "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["ranks"], plan["micro_batches"], plan["tokens_per_step"]) == (8, 8, 4096)
    assert plan["flops_per_step"] == plan["flops_per_token"] * 4096
    for stage in plan["stages"]:
        parts = ("weights", "masters", "optimizer_state", "attention_bias", "pipeline_buffers")
        always = sum(stage[part] for part in parts)
        assert stage["permanent"] == always
        assert stage["peak"] == always + max(phase["bytes"] for phase in stage["phases"])
    assert plan["all_ranks_bytes"] == 4 * sum(stage["peak"] for stage in plan["stages"])
    machine = plan["machine"]
    assert machine["needed"] == pytest.approx(plan["all_ranks_bytes"] * HEAP_SHARE + 8 * PROCESS_BYTES, rel=1e-6)
    assert machine["fits"] and machine["available"] <= psutil.virtual_memory().total


PIPELINE = ["plan", "model=demo", "model.num_layers=8", "model.vocab_size=2048", "device=cpu"]
PIPELINE += ["parallel.pp=2", "train.global_batch_size=6"]


def test_schedules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a missing schedule, one that this layout does not allow without its reason, and a wrong bubble."""
    assert run([*PIPELINE, "parallel.schedule=zb_v", "schedules=true", "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = {(row["schedule"], row["virtual_stages"]): row for row in plan["schedules"]}
    assert list(found) == [
        ("1f1b", 1),
        *(("interleaved", v) for v in (2, 3, 4)),
        ("zb_h1", 1),
        ("dualpipe_v", 2),
        ("zb_v", 2),
    ]
    shares = {key: row["bubble_share"] for key, row in found.items()}
    assert shares["1f1b", 1] == pytest.approx(1 / 7) and shares["interleaved", 3] == pytest.approx(1 / 19)
    assert shares["zb_h1", 1] == pytest.approx(1 / 19) and shares["zb_v", 2] == pytest.approx(1 / 37)
    assert [key for key, row in found.items() if row["chosen"]] == [("zb_v", 2)]
    assert plan["pipeline"]["passes_waiting"] == [4, 4] and plan["bubble_share"] == shares["zb_v", 2]
    peaks = [found[key]["largest_rank_bytes"] for key in (("1f1b", 1), ("zb_v", 2))]
    assert peaks[1] == plan["largest_rank_bytes"] != peaks[0]
    assert run([*PIPELINE, "model.num_layers=6", "schedules=true"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"zb_v +2 +2\.7%", out)
    assert "interleaved with 4 stages a rank: model.num_layers = 6 is below parallel.pp * virtual_stages = 2 * 4" in out


def test_the_planned_step_is_drawn(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plot of another schedule, a trace that ignores the given speeds, and a file written elsewhere."""
    speeds = ["rank_tflops=0.5", "link_gigabytes_per_s=1", "link_latency_us=200"]
    assert run([*PIPELINE, "parallel.schedule=zb_h1", "timeline=step.json", *speeds]) == 0
    assert run([*PIPELINE, "parallel.schedule=interleaved", "timeline=step.svg"]) == 0
    capsys.readouterr()
    events = json.loads((elsewhere / "step.json").read_text())["traceEvents"]
    waits = [event["dur"] for event in events if event.get("cat") == "receive_activation"]
    assert len(waits) == 6 and max(waits) > 200
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"forward", "backward_input", "backward_weight"}
    picture = (elsewhere / "step.svg").read_text()
    assert "interleaved, 2 ranks, 6 micro-batches, planned" in picture and picture.count("rank 1") == 1
    assert run([*PIPELINE, "timeline=nowhere/step.json"]) == 2
    assert "timeline = nowhere/step.json cannot be written (No such file" in capsys.readouterr().err


def test_the_parts_of_a_steps_time_are_drawn(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plot that omits a part or shows another step than is printed, and an impossible plot not refused."""
    asked = ["plan", "model=bloom_560m", "model.vocab_size=50304", "parallel.tp=2", "device=a100_80gb", "json=true"]
    assert run([*asked, "plot=step.html"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert run([*asked, "plot=step.svg"]) == 0 and run([*asked, "plot=step.png"]) == 0
    page, picture = (elsewhere / "step.html").read_text(), (elsewhere / "step.svg").read_text()
    for name, seconds in plan["parts"].items():
        assert f"<td>{name}</td>" in page and f">{name}</text>" in picture
        assert f">{seconds / plan['step_time_s']:.1%}</td>" in page
    assert f"seconds of {plan['step_time_s']:,.2f} s" in picture
    assert (elsewhere / "step.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for words, named in (
        (["plot=step.pdf"], "must end in .png, .svg or .html"),
        (["plot=step.png", "device=cpu"], "needs a device whose speed is known"),
        (["plot=nowhere/step.png"], "plot = nowhere/step.png cannot be written (No such file"),
    ):
        assert run([*asked, *words]) == 2
        assert named in capsys.readouterr().err


def test_dry_run_compares_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a dry run that omits the pipeline bubble, and parallel.partition=auto that stays unresolved."""
    train = ["train", "train.steps=1", "model.num_layers=8", "model.vocab_size=4096", DATA, "run.dry_run=true"]
    train += ["parallel.pp=2", "parallel.dp=1", "train.global_batch_size=6"]
    assert run([*train, "parallel.partition=auto"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"pipeline +1f1b on 2 ranks: bubble 14\.3%, [\d.]+% by estimated FLOPs; passes waiting 2, 1", out)
    assert re.search(r"dualpipe_v +2 +2\.7%", out) and re.search(r"^ *1f1b +1 +14\.3%", out, re.MULTILINE)
    assert re.search(r"parallel\.partition=auto: by FLOPs the head weighs [\d.]+ blocks", out)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rank_tflops=0"], "rank_tflops = 0.0: must be positive"),
        (["link_latency_us=3"], "need rank_tflops"),
        (["timeline=step.gif"], "timeline = step.gif: must end in .svg, .png or .json"),
        (
            ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=3", "model.num_layers=5"],
            "model.num_layers = 5 is below parallel.pp * virtual_stages = 2 * 3",
        ),
        (["parallel.tp=3"], "model.num_heads = 4 is not divisible by parallel.tp = 3"),
        (["train.global_batch_size=6", "train.micro_batch_size=4"], "train.global_batch_size"),
        (["train.seq_len=0"], "train.seq_len = 0: must be at least 1"),
        (["device=tpu"], "device"),
        (["ranks=true", "cluster.ranks_per_node=0"], "cluster.ranks_per_node = 0: must be at least 1"),
        (
            ["parallel.tp=4", "parallel.sequence_parallel=true", "train.seq_len=90"],
            "train.seq_len = 90 is not divisible by parallel.tp = 4",
        ),
        (["model.layers=3"], "model.layers"),
        (["model.position=learned", "train.seq_len=4096"], "model.max_seq_len = 256"),
    ],
)
def test_plan_errors_are_one_message(overrides: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, and a plan for a configuration that cannot be built."""
    assert run(["plan", *overrides]) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error


@pytest.mark.always
def test_train_refuses_what_cannot_fit(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches BLOOM-176B that makes a laptop swap for hours, and a refusal that leaves a run directory behind."""
    start = time.process_time()
    assert run(["train", "experiment=bloom_176b"]) == 2
    assert time.process_time() - start < 10
    error = capsys.readouterr().err
    assert re.search(
        r"rank 0 needs 44\.\d GiB, 16\.\d GiB of it fp32 gradients, all 384 ranks together 20,\d{3}\.\d GiB; "
        r"this machine has [\d.]+ GiB available: lower .*run\.check_memory=false",
        error,
    ), error
    assert not list(elsewhere.iterdir())


def test_dry_run_shows_memory_and_ends_as_a_start_would(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a dry run that ends with 0 although the start would be refused for want of memory."""
    for code, more in ((2, []), (0, ["run.check_memory=false"])):
        assert run(["train", "experiment=bloom_176b", "run.dry_run=true", *more]) == code
        out, err = capsys.readouterr()
        assert re.search(r"memory +at most 44\.\d GiB a rank \(rank 0\).*does not fit", out)
        assert ("rank 0 needs 44." in err) == (code == 2)
    assert run(["train", "train.steps=1", "model.vocab_size=512", DATA, "run.dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"memory .*: fits", out) and re.search(r"run +tiny-\w{8}: new", out)


def test_the_engine_is_shown_and_checked(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan that does not say which engine trains, and a refusal after a run directory was written."""
    train = ["train", "train.steps=1", "model.vocab_size=512", DATA]
    for engine, shown in (
        ("auto", "native, ZeRO-1\n"),
        ("deepspeed", "deepspeed, ZeRO-1; memory and step time are planned for the native"),
    ):
        assert run([*train, f"engine={engine}", "run.dry_run=true"]) == 0
        assert f"engine     {shown}" in capsys.readouterr().out
        assert run(["plan", "model.vocab_size=512", f"engine={engine}", "device=cpu"]) == 0
        assert f"engine: {shown}" in capsys.readouterr().out
    assert run(["plan", "model.vocab_size=512", "device=cpu", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "native"
    for verb in (train, ["plan", "model.vocab_size=512"], ["verify_layout"]):
        assert run([*verb, "engine=native", "parallel.zero_stage=2", "parallel.dp=2"]) == 2
        error = capsys.readouterr().err
        assert "parallel.zero_stage = 2 is not supported with engine = native" in error
        assert "use engine=deepspeed, or parallel.zero_stage=1" in error
    assert not list(elsewhere.iterdir())


def test_dry_run_reports_the_number_of_kv_heads(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a dry run that does not report the number of KV heads."""
    assert run(["train", "train.steps=1", "model=tiny_llama", "model.vocab_size=512", DATA, "run.dry_run=true"]) == 0
    assert "2 layers, hidden 64, 4 heads on 2 KV heads, rope; vocabulary 512" in capsys.readouterr().out


@pytest.mark.always
def test_launcher_resolves_auto_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches auto that is not resolved, that recomputes although the run fits without, or that recomputes too little.

    The batch is grown until the run fits this machine with recomputation only.
    """
    train = ["train", "train.steps=1", "model.num_layers=12", "model.vocab_size=512", DATA, "run.dry_run=true"]
    train += ["model.hidden_size=256", "train.global_batch_size=65536", "train.precision=fp32"]
    assert run([*train, "parallel.recompute=auto"]) == 0
    small = capsys.readouterr().out
    assert "parallel.recompute=auto recomputes nothing: all ranks" in small and ": fits" in small
    plain = next(
        size for size in (2**k for k in range(8, 17)) if not fits([*train, f"train.micro_batch_size={size}"], capsys)
    )
    large = [*train, f"train.micro_batch_size={plain}"]
    assert run([*large, "parallel.recompute=auto"]) == 0
    out = capsys.readouterr().out
    assert ": fits" in out
    [blocks] = re.findall(r"recompute=auto recomputes (\d+) blocks", out)
    assert 0 < int(blocks) <= 12
    assert re.search(r"without it [\d.]+ GiB", out)


def fits(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    code, out = run(overrides), capsys.readouterr().out
    assert code == (0 if ": fits" in out else 2)
    return code == 0


def test_the_time_of_a_step_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan that ignores the device's speed: BLOOM's step took 105 s (bigscience, tr11-176B-ml)."""
    bloom = [
        "plan",
        "experiment=bloom_176b",
        "device=a100_80gb",
        "nic_gigabytes_per_s=6.25",
        "train.micro_batch_size=2",
    ]
    assert run([*bloom, "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_time_s"] == pytest.approx(105.2, rel=0.1)
    assert sum(plan["parts"].values()) == pytest.approx(plan["step_time_s"])
    assert plan["tokens_per_s_per_device"] == pytest.approx(2048 * 2048 / 384 / plan["step_time_s"])
    assert plan["mfu"] == pytest.approx(plan["tflops_per_device"] / 312)
    assert plan["memory_bytes"] == plan["machine"]["needed"] and plan["machine"]["fits"]
    assert run(bloom) == 0
    text = capsys.readouterr().out
    assert "a step on 384 x a100_80gb" in text and "fp32 gradient accumulation (main_grad)" in text


def test_a_host_that_is_too_slow_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches kernel launches that take no time, and advice that the layout forbids or that is already followed."""
    small = ["plan", "model=gpt3_350m", "train.seq_len=2048", "train.micro_batch_size=1", "device=h200"]
    advice = "with ops.cuda_graphs=true a step takes"
    seconds = []
    for overrides, advised in (
        ([], True),
        (["ops.cuda_graphs=true"], False),
        (["parallel.tp=2"], False),
        (["train.micro_batch_size=8"], False),
    ):
        assert run([*small, "train.global_batch_size=8", *overrides]) == 0
        said = capsys.readouterr().out
        assert (advice in said) is advised and "more on a GPU" not in said
        assert run([*small, "train.global_batch_size=8", *overrides, "json=true"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["parts"].get("host", 0.0))
    assert seconds[0] > 0.1 and seconds[1] == 0.0 and seconds[2] > 0.1 > seconds[3]
    # main_grad of 354 million parameters, which a step of one micro-batch otherwise has at its end only, and a rank's
    # reduced half.
    two = [*small, "train.global_batch_size=2", "parallel.dp=2"]
    assert run(two) == 0
    assert ", with 2.0 GiB more on a GPU" in capsys.readouterr().out
    assert run([*two, "json=true"]) == 0
    room_gib = json.loads(capsys.readouterr().out)["machine"]["needed"] / 2**30 + 1.9
    (tmp_path / "smaller.yaml").write_text(f"name: smaller\nlike: h200\nmemory_gib: {room_gib}\n")
    assert run([*two, f"device={tmp_path / 'smaller.yaml'}"]) == 0
    assert advice not in capsys.readouterr().out


def test_a_plan_says_what_a_run_will_measure_of_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan of ops.cuda_graphs=auto that estimates time or memory of the other value."""
    small = ["plan", "model=gpt3_350m", "train.seq_len=2048", "device=h200", "train.global_batch_size=8"]
    for size, taken in ((1, "true"), (8, "false")):
        plans = []
        for value in ("auto", taken):
            assert run([*small, f"train.micro_batch_size={size}", f"ops.cuda_graphs={value}", "json=true"]) == 0
            plans.append(json.loads(capsys.readouterr().out))
        assert plans[0]["step_time_s"] == plans[1]["step_time_s"] and plans[0]["machine"] == plans[1]["machine"]
        assert run([*small, f"train.micro_batch_size={size}", "ops.cuda_graphs=auto"]) == 0
        said = capsys.readouterr().out
        assert "ops.cuda_graphs=auto is expected to measure that a step takes" in said
        assert ("without: graphs" in said) is (taken == "true")


def test_the_best_layouts_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a best layout whose overrides give another layout, and a search that ignores the number of devices."""
    bloom = ["plan", "model=bloom_1b1", "train.seq_len=2048", "train.global_batch_size=8", "device=h100", "json=true"]
    assert run([*bloom, "search=true", "gpus=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = [row["step_time_s"] for row in found["best"]]
    assert len(seconds) == 10 and seconds == sorted(seconds)
    assert run([*bloom, *found["overrides"].split()]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["ranks"] == 4 and again["machine"]["fits"]
    assert again["step_time_s"] == pytest.approx(seconds[0], rel=0.01)
    assert run(["plan", "model=llama3_8b", "search=true", "gpus=4"]) == 2
