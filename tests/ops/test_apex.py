"""Detection of apex in realistic package trees; NVIDIA's norms and sums of squares against fp64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megads.errors import ConfigError
from megads.ops.adamw import square_sums
from megads.ops.apex import EXTENSIONS, ApexState, find_apex, load_apex, require_apex
from megads.ops.config import TORCH, Implementation, Kernels, OpsConfig
from megads.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megads.ops.resolve import assumes_fused_kernels, choose
from tests.ops.accuracy import check_error

APEX = OpsConfig(Implementation.apex)
TREES = {
    "0.9.10.dev0": ("decorators.py", "exceptions.py", "forms.py", "lib/__init__.py", "models.py", "views.py"),
    "0.1": (
        "_autocast_utils.py",
        "fused_dense/__init__.py",
        "mlp/__init__.py",
        "multi_tensor_apply/__init__.py",
        "normalization/__init__.py",
        "optimizers/__init__.py",
    ),
}
"""Files in the releases of both projects: PyPI's of this version, and NVIDIA's, whose releases are all 0.1."""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a release of apex, and extension modules, in the only folder of sys.path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])

    def lay_out(version: str, *extensions: str) -> Path:
        for name in ("__init__.py", *TREES[version]):
            file = site / "apex" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("raise AssertionError('who asks must not import')\n")
        metadata = site / f"apex-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n")
        for name in extensions:
            (site / f"{name}{EXTENSION_SUFFIXES[0]}").write_bytes(b"compiled for another machine")
        return site

    return lay_out


def refusal(cuda: bool, config: OpsConfig = APEX, optimizer: Implementation = Implementation.auto) -> str:
    """Returns the message with which a run is refused; its exit code must be that of a bad config."""
    with pytest.raises(ConfigError) as caught:
        choose(config, cuda=cuda, optimizer=optimizer)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.usefixtures("install")
def test_a_missing_apex_is_refused_before_ranks_start() -> None:
    """Catches a run that starts its ranks without the requested apex."""
    assert find_apex().state is ApexState.absent
    message = refusal(cuda=True)
    assert "ops.impl = apex cannot run: NVIDIA apex is not installed" in message and message.endswith("ops.impl=auto")
    assert "--build-option=--cpp_ext" in message and "--build-option=--cuda_ext" in message


def test_pypis_apex_is_not_taken_for_nvidias(install: Install) -> None:
    """Catches PyPI's package taken for NVIDIA's, also with extensions left behind by an earlier installation."""
    install("0.9.10.dev0", *EXTENSIONS)
    found = find_apex()
    assert (found.state, found.version) == (ApexState.wrong_package, "0.9.10.dev0")
    message = refusal(cuda=True)
    for text in ("apex 0.9.10.dev0 is not NVIDIA's", "Pyramid", "pip uninstall apex", "--build-option=--cuda_ext"):
        assert text in message


@pytest.mark.slow
def test_pypis_real_release_is_not_taken_for_nvidias(tmp_path: Path) -> None:
    """Catches a real PyPI release that differs from the tree in the test above. Needs a package index."""
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "--retries", "0", "--timeout", "20", "install", "--quiet", "--no-deps")
    installed = subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(site), "apex==0.9.10.dev0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if installed.returncode:
        pytest.skip(f"pip cannot install PyPI's apex: {installed.stderr.strip().splitlines()[-1]}")
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\nfrom megads.ops.apex import find_apex; print(find_apex().text)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.startswith("apex 0.9.10.dev0 is not NVIDIA's: PyPI's package of that name is another project")


@pytest.mark.parametrize(("built", "missing"), [((), "amp_C and fused_layer_norm_cuda"), (("amp_C",), "fused_layer")])
def test_an_apex_without_extensions_is_refused(built: tuple[str, ...], missing: str, install: Install) -> None:
    """Catches a Python-only build, pip's default, that fails at the first step, and a message without build flags."""
    install("0.1", *built)
    assert find_apex().state is ApexState.python_only
    assert f"NVIDIA's apex 0.1 was built without {missing}" in refusal(cuda=True)
    message = refusal(cuda=True, config=OpsConfig(Implementation.torch), optimizer=Implementation.apex)
    assert message.startswith("optim.impl = apex cannot run") and "--cpp_ext and --cuda_ext" in message


def test_a_complete_apex_is_used_on_gpus(install: Install) -> None:
    """Catches a complete apex that is refused, one that is used on a CPU, and a choice that is reported wrongly."""
    install("0.1", *EXTENSIONS)
    assert find_apex().state is ApexState.present
    apex, torch_ = Implementation.apex, Implementation.torch
    assert choose(APEX, cuda=True) == Kernels(apex, apex)
    apart = choose(OpsConfig(torch_), cuda=True, optimizer=apex)
    assert (apart.loaded, apart.text) == (False, "ops.impl: torch, optim.impl: apex")
    assert choose(APEX, cuda=True, optimizer=torch_) == Kernels(apex, torch_)
    message = refusal(cuda=False)
    assert "GPUs only, and this run is on CPUs" in message and "NVIDIA's apex 0.1 with amp_C" in message


def test_an_apex_built_for_another_torch_is_refused(install: Install) -> None:
    """Catches a traceback where apex was built for another PyTorch: its file is found, but the loader refuses it."""
    install("0.1", *EXTENSIONS)
    require_apex("optim.impl", cuda=True)
    with pytest.raises(
        ConfigError, match=r"optim\.impl = apex cannot run: its extension amp_C cannot be loaded \(.*\)"
    ):
        load_apex("optim.impl")


@pytest.mark.usefixtures("install")
def test_a_plan_needs_no_apex() -> None:
    """Catches a plan for a cluster that is refused on the machine that makes the plan."""
    assert not assumes_fused_kernels(APEX, cuda=True) and not assumes_fused_kernels(APEX, cuda=False)


def whole_apex() -> str:
    """Returns why apex's kernels cannot be compared here; empty if they can."""
    if not torch.cuda.is_available():
        return "no GPU"
    found = find_apex()
    return "" if found.state is ApexState.present else found.text


without_apex = pytest.mark.skipif(bool(whole_apex()), reason=f"apex: {whole_apex()}")


BY_APEX = Kernels(Implementation.apex, Implementation.apex)


def by(norm: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    if norm == "layer":
        return (layer_norm(x, weight, bias, 1e-5, kernels),)
    if norm == "rms":
        return (rms_norm(x, weight, 1e-5, kernels),)
    if norm == "add layer":
        return add_layer_norm(x, residual, weight, bias, 1e-5, kernels)
    return add_rms_norm(x, residual, weight, 1e-5, kernels)


@pytest.mark.gpu
@without_apex
@pytest.mark.parametrize("norm", ["layer", "rms", "add layer", "add rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 150, 1024), (3, 1, 65), (7, 8200), (0, 64)])
def test_apex_norms_equal_torchs(norm: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Catches another eps or variance, and weights read in the wrong dtype, in the forward and the backward pass."""
    generator = torch.Generator().manual_seed(shape[-1])
    shapes = (shape, shape, shape[-1:], shape[-1:])
    exact_inputs = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
    inputs = [each.to(dtype) for each in exact_inputs]

    def run(dtype: torch.dtype, device: str, kernels: Kernels) -> list[Tensor]:
        leaves = [each.to(device, dtype, copy=True).requires_grad_() for each in inputs]
        outs = by(norm, *leaves, kernels)
        draw = torch.Generator().manual_seed(1)
        grads = [torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out) for out in outs]
        torch.autograd.backward(outs, grads)
        found = [*outs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        return [each.detach().cpu() for each in found]

    found, eager, exact = run(dtype, "cuda", BY_APEX), run(dtype, "cuda", TORCH), run(torch.float64, "cpu", TORCH)
    for mine, theirs, right in zip(found, eager, exact, strict=True):
        if right.numel():
            check_error(mine, theirs, right)
        else:
            assert mine.shape == right.shape


@pytest.mark.gpu
@without_apex
def test_apex_square_sums_equal_the_references() -> None:
    """Catches pieces that begin or end at the wrong element, and apex's lost sums of pieces before an empty one."""
    flat = torch.randn(400_001, generator=torch.Generator().manual_seed(0))
    for pieces in ([[0, 140_003], [140_010, 140_011], [140_064, 400_001]], [[3, 200_000], [200_000, 200_000]]):
        bounds = torch.tensor(pieces)
        exact = torch.stack([flat[start:stop].double().square().sum() for start, stop in pieces])
        found = square_sums(flat.cuda(), bounds, BY_APEX).cpu()
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=0.0)
    assert not square_sums(torch.full((8,), torch.nan).cuda(), torch.tensor([[0, 8]]), BY_APEX).isfinite()
