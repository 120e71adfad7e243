"""`megads doctor`: checks this machine and its software. Also works if Hydra does not."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence

from megads import __version__
from megads.cli.verb import Invocation, Verb, config_dir
from megads.errors import EXIT_OK, UnhealthyNode
from megads.tools.doctor.examine import DoctorConfig
from megads.tools.doctor.finding import Finding, Status, ok, problem, show

_JSON_FLAGS = {"--json": "json=true"}


def run(config: DoctorConfig, _invocation: Invocation) -> int:
    """Runs the checks, prints the findings, and returns 9 if a problem prevents training."""
    config.check()
    return report(config, ok("hydra", "composes configs"))


def hydra_defect() -> str | None:
    """Returns why Hydra cannot compose configs in this environment, or None if it can."""
    try:
        from hydra.core.plugins import Plugins

        import megads.cli.entry  # noqa: F401

        Plugins.instance()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if (config_dir() / "doctor.yaml").is_file() else f"no doctor.yaml in {config_dir()}"


def run_without_hydra(arguments: Sequence[str], defect: str) -> int:
    """Runs the checks with default settings; only --json of the command line is used.

    Args:
        arguments: command line after the verb.
        defect: why Hydra cannot compose configs.
    """
    wants_json = any(_JSON_FLAGS.get(argument, argument) == "json=true" for argument in arguments)
    remedy = "see the other findings; else uninstall the plugin or package that the message names"
    finding = problem("hydra", defect, "no verb can compose its config", remedy)
    return report(DoctorConfig(json=wants_json), finding)


def report(config: DoctorConfig, hydra: Finding) -> int:
    """Runs all checks, prints the findings and returns the exit code.

    Args:
        config: the verb's config.
        hydra: finding about Hydra.
    """
    from megads.tools.doctor.examine import examine, worst

    start = time.perf_counter()
    findings = [hydra, *examine(config, config_dir())]
    seconds = time.perf_counter() - start
    status = worst(findings)
    if config.json:
        content = {
            "megads": __version__,
            "status": status,
            "seconds": round(seconds, 3),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(content, indent=2))
    else:
        show(findings)
        print(f"{_summary(findings)} ({seconds:.1f} s)")
    return UnhealthyNode.exit_code if status == Status.problem else EXIT_OK


def _summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in Status}
    problems, notes = counts[Status.problem], counts[Status.note]
    verdict = "cannot train as it is" if problems else "can train"
    counted = [f"{problems} problem{'s' * (problems > 1)}"] if problems else []
    counted += [f"{notes} note{'s' * (notes > 1)}"] if notes else []
    return f"This machine {verdict}: {', '.join([*counted, f'{counts[Status.ok]} in order'])}."


VERB = Verb("doctor", DoctorConfig, run, flags=_JSON_FLAGS)
