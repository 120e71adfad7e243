"""Tests datatrove pipelines, run by its executors, against the output of `megads preprocess` on the same files."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.data.indexed.sidecar import Sidecar, read_sidecar
from megads.errors import ConfigError, DataError
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer

datatrove = pytest.importorskip("datatrove", reason="datatrove is not installed: pip install 'megads[datatrove]'")

from datatrove.data import Document  # noqa: E402
from datatrove.executor import LocalPipelineExecutor  # noqa: E402
from datatrove.pipeline.filters import LambdaFilter  # noqa: E402
from datatrove.pipeline.readers import JsonlReader  # noqa: E402

from megads.tools.datatrove import MegadsJoin, MegadsWriter  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
WORDS = ["the", "quick", "brown fox", "naïve", "jumps\n\n", "🚀", "over", "a", "lazy", "<|endoftext|>", "dog"]


def prose(number: int) -> str:
    random = np.random.default_rng(number)
    return " ".join(WORDS[choice] for choice in random.integers(0, len(WORDS), random.integers(5, 400)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five JSON-lines files, one compressed, one with a document that is split into pieces; and a tokenizer."""
    root = tmp_path_factory.mktemp("datatrove")
    (root / "text").mkdir()
    for number in range(5):
        texts = [prose(100 * number + place) for place in range(40)] + ([prose(7) * 500] if number == 2 else [])
        lines = "".join(json.dumps({"text": text, "id": f"{number}-{len(text)}"}) + "\n" for text in texts)
        path = root / "text" / f"{number}.jsonl"
        if number == 3:
            Path(f"{path}.gz").write_bytes(gzip.compress(lines.encode()))
        else:
            path.write_text(lines)
    (root / "learnt.txt").write_text(" ".join(prose(number) for number in range(30)))
    train_tokenizer(TokenizerConfig(input=[str(root / "learnt.txt")], output=str(root / "t.json"), vocab_size=400))
    return root


def keep(document: Document) -> bool:
    return len(document.text) % 3 != 0


def made_at(output: Path) -> list[bytes]:
    return [Path(f"{output}{ending}").read_bytes() for ending in (".bin", ".idx", ".tokenizer.json")]


def run(
    corpus: Path, output: Path, tasks: int, workers: int = 1, filters: tuple[Any, ...] = (), **changes: Any
) -> Sidecar:
    """Reads, filters and writes in `tasks` tasks, and joins; returns the sidecar."""
    writer = MegadsWriter(str(output), str(corpus / "t.json"), **changes)
    logs = f"{output}-logs"
    write = LocalPipelineExecutor(
        [JsonlReader(str(corpus / "text")), *filters, writer], tasks=tasks, workers=workers, logging_dir=f"{logs}/write"
    )
    LocalPipelineExecutor([MegadsJoin(writer)], tasks=1, logging_dir=f"{logs}/join", depends=write).run()
    assert not Path(f"{output}.parts").exists()
    sidecar = read_sidecar(output)
    assert sidecar is not None
    return sidecar


def test_any_number_of_tasks_gives_the_bytes_of_preprocess(corpus: Path, tmp_path: Path) -> None:
    """Catches documents in task order: each task reads every n-th file."""
    expected = preprocess(
        PreprocessConfig(input=[str(corpus / "text")], tokenizer=str(corpus / "t.json"), output=str(tmp_path / "one"))
    ).sidecar
    for tasks in (1, 3, 7):
        made = run(corpus, tmp_path / f"by{tasks}", tasks)
        assert made_at(tmp_path / f"by{tasks}") == made_at(tmp_path / "one")
        assert (made.documents, made.tokens, made.text_bytes) == (201, expected.tokens, expected.text_bytes)
        assert made.input_files == [str(path) for path in sorted((corpus / "text").iterdir())]
    filtered = [run(corpus, tmp_path / f"kept{tasks}", tasks, filters=(LambdaFilter(keep),)) for tasks in (1, 2)]
    assert made_at(tmp_path / "kept1") == made_at(tmp_path / "kept2")
    assert 0 < filtered[0].documents < expected.documents
    # order=rank keeps the order of the tasks, each of which reads every n-th file.
    run(corpus, tmp_path / "ranks", 2, order="rank")
    assert made_at(tmp_path / "ranks") != made_at(tmp_path / "one")


def test_the_example_runs(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an example in docs/data.md that does not run."""
    page = (REPOSITORY / "docs" / "data.md").read_text()
    (example,) = re.findall(r"```python\n(.*?MegadsJoin.*?)```", page, re.DOTALL)
    (tmp_path / "raw").symlink_to(corpus / "text")
    (tmp_path / "tokenizer.json").symlink_to(corpus / "t.json")
    monkeypatch.chdir(tmp_path)
    exec(example.replace("workers=2", "workers=1"), {})
    sidecar = read_sidecar("data/web")
    assert sidecar is not None and sidecar.documents > 100


def test_a_missing_task_is_named(corpus: Path, tmp_path: Path) -> None:
    """Catches a join of an incomplete set of tasks, and a task that duplicates its documents when it is rerun."""
    writer = MegadsWriter(str(tmp_path / "out"), str(corpus / "t.json"))
    documents = [
        Document(f"text {number}", str(number), metadata={"file_path": f"f{number // 4}"}) for number in range(9)
    ]
    assert list(writer.run(documents[4:], 1, 2)) == documents[4:], "it passes documents on"
    with pytest.raises(DataError, match="1 of 2 ranks are not complete: 0; run them again"):
        list(MegadsJoin(writer).run())
    list(writer.run(documents[4:], 1, 2))
    list(writer.run(documents[:4], 0, 2))
    list(MegadsJoin(writer).run())
    list(MegadsJoin(writer).run())
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar is not None and (sidecar.documents, sidecar.input_files) == (9, ["f0", "f1", "f2"])
    with pytest.raises(ConfigError, match="give overwrite=True"):
        list(writer.run(documents, 0, 1))


def test_bad_documents(corpus: Path, tmp_path: Path) -> None:
    """Catches an invalid document that ends the pipeline, or is dropped without a message."""
    writer = MegadsWriter(str(tmp_path / "out"), str(corpus / "t.json"))
    list(writer.run([Document("good", "a"), Document("", "b"), Document("half \ud800", "c")]))
    list(MegadsJoin(writer).run())
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar is not None and sidecar.documents == 1
    assert sidecar.rejected_examples == ["b:2: empty text", "c:3: not Unicode: half a surrogate pair"]
    files = [Document("good", str(number), metadata={"file_path": f"f{number % 2}"}) for number in range(3)]
    with pytest.raises(DataError, match="other documents of f0 came before those of f1"):
        list(MegadsWriter(str(tmp_path / "other"), str(corpus / "t.json")).run(files))
    with pytest.raises(ConfigError, match="order = files: want one of file, rank"):
        MegadsWriter("out", "t.json", order="files")


@pytest.mark.slow
@pytest.mark.distributed
def test_processes(corpus: Path, tmp_path: Path) -> None:
    """Catches a pipeline step that cannot be sent to another process."""
    run(corpus, tmp_path / "one", 1)
    run(corpus, tmp_path / "two", 4, workers=2)
    assert made_at(tmp_path / "one") == made_at(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.distributed
def test_ray(corpus: Path, tmp_path: Path) -> None:
    """Catches a pipeline step that Ray cannot send to its workers."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'megads[ray]'")
    from datatrove.executor import RayPipelineExecutor

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        writer = MegadsWriter(str(tmp_path / "ray"), str(corpus / "t.json"))
        pipeline = [JsonlReader(str(corpus / "text")), LambdaFilter(keep), writer]
        write = RayPipelineExecutor(
            pipeline, tasks=3, workers=2, mem_per_cpu_gb=0.25, logging_dir=str(tmp_path / "write"), cpus_per_task=1
        )
        RayPipelineExecutor(
            [MegadsJoin(writer)], tasks=1, mem_per_cpu_gb=0.25, logging_dir=str(tmp_path / "join"), depends=write
        ).run()
    finally:
        ray.shutdown()
    run(corpus, tmp_path / "one", 1, filters=(LambdaFilter(keep),))
    assert made_at(tmp_path / "ray") == made_at(tmp_path / "one")
