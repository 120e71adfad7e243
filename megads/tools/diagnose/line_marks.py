"""What a line of a log is: progress of a training, its end, an error, a warning, a setting."""

from __future__ import annotations

import re

BAD_NEWS = re.compile(
    r"\b(?:no|not|never|without|cannot|can't|couldn't|unable|giving up|dead|died|lost|down|full|bad|wrong|nan|infinite|"
    r"timed out|"
    r"(?:fail|err|invalid|missing|kill|abort|refus|den(?:y|ied)|exceed|time-?out|stall|stuck|hang|hung|corrupt|"
    r"brok|fault|fatal|panic|crash|evict|preempt|interrupt|terminat|reset|unreach|unhealthy|unexpected|overflow|diverg|"
    r"exhaust|conflict|mismatch|exception|cancel|reject|unavailable|unsupported|incompatible|damag|truncate)\w*)\b",
    re.IGNORECASE,
)
"""Lines without a signature are classified only if they contain such a word: healthy lines use the other words too."""
ENDS = re.compile(r"\bclos(?:ed|ing)\b|\bsignal\b|\bexit|\bdump|\bSIG[A-Z]+|out of memory|asked to stop", re.IGNORECASE)
"""Words about an end that are no bad news by themselves."""
HARMLESS = re.compile(
    r"\b(?:INFO|DEBUG|NOTICE)\b|(?:^|\[)I\d{4} |\b[Cc]onsider (?:increasing|using|setting|adding)\b|"
    r"may be a bottleneck|\b(?:is|are) (?:recommended|deprecated)\b|\b[Yy]ou should probably\b"
)
PROGRESS = re.compile(
    r"\b(?:global_)?(?:step|iter(?:ation)?|epoch|batch)s?\b[\s:=\[#]*\d+|\b(?:lm )?loss\b[\s:='\"]*-?\d|"
    r"\d+(?:\.\d+)?(?:it/s|s/it)",
    re.IGNORECASE,
)
FINISHED = re.compile(
    r"\btraining (?:is |has )?(?:completed?|finished|done)\b(?! with| in error)|\bdone training\b|"
    r"\b(?:finished|completed) training\b|\[after training is done\]|"
    r"`?Trainer\.fit`? stopped: `?max_\w+|['\"]train_runtime['\"]|\bfinished at step \d|"
    r"^stopped at step \d|^end: step \d|\bexiting program (?:after|at) (?:iteration|\d)|Process \d+ exits successfully|"
    r"\breached (?:max_steps|the last step)\b",
    re.IGNORECASE,
)
"""A line that says that the training ended as planned, in the words of megads and other trainers."""
STEP = re.compile(r"\b(?:step|iter(?:ation)?|epoch)s?\b[\s:=\[#'\"]*\d+|\bloss\b[\s:='\"]*-?\d", re.IGNORECASE)
"""Progress of a training; a progress bar alone may be of anything."""
EVALUATION = re.compile(
    r"^\W*(?:\S+ )?(?:validation|validating|test(?:ing)?|evaluat\w+)\b|['\"](?:eval|test)_\w*(?:loss|runtime)['\"]",
    re.IGNORECASE,
)
"""The result of an evaluation, which also follows the last step."""
EXCEPTION = re.compile(
    r"(?:^|[\s\]:|│])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure)(?::\s|\s*$)|"
    r"(?:^|[\s\]:|│])(?:[a-z_]\w*\.)+[A-Z]\w+(?::\s|\s*$)|\b(?:ERROR|FATAL|CRITICAL|(?:\w+_)?error:)|"
    r"Assertion .*failed|what\(\):|^[A-Z]\w*(?:Error|Exception)\(['\"]"
)
IGNORED_COMMAND = re.compile(r"^(?:\S*/)?(?:rm|rmdir|ln|ls|chmod|chown|mkdir|ulimit|module|source|cd): ")
"""A failed command of a job script; the script continues after it."""
WRAPPER = re.compile(r"\b(?:raised|following (?:error|exception)\b.*|\w*Error: \S.*):\s*$")
"""An exception line that only introduces the exception on the next line."""
PASSING = re.compile(
    r"\b(?:WARNING|WARN|(?:User|Future|Deprecation|Runtime)Warning|INFO|DEBUG|NOTICE)\b|(?:^|\[)[WI](?:\d{3,4})? |"
    r"warnings?\.warn|\bwarning:",
)
SETTING = re.compile(
    r"^\s*(?:[\w.-]+ \.{3,} .*|(?:export )?[A-Z][A-Z0-9]*_\w+=\S*|"
    r"(?!\w*(?:error|exit|signal|reason|status|state|cause|message|loss|norm|code)\w*\s*[:=])"
    r"['\"]?[a-z][\w.-]*['\"]?\s*[:=]\s*['\"]?[\w.,+/\[\]-]*['\"]?,?)\s*$"
)
"""A setting with its value, as programs print their arguments, configs and environments."""
SERIOUS = re.compile(
    r"NCCL WARN|kernel:|NVRM|slurmstepd|srun:|Xid|\bnvidia-nvswitch|closing signal|death signal|got signal|NCCL EP|"
    r"elastic|not compatible with the current PyTorch|[Tt]ried to allocate|loss scale to (?:0(?:\.0*)?\s*$|[\d.]+e-\d)"
)
RETRIED = re.compile(
    r"\bretry(?:ing)?\b(?! (?:count|limit|exc))|will (?:be )?retr|\battempt \d+|falling? ?back|\bignor(?:ed|ing)\b|"
    r"\bskipp(?:ed|ing)\b|using default|thrown while requesting|\brecovered\b|non-fatal|\bcontinuing\b",
    re.IGNORECASE,
)


def mentions_failure(text: str) -> bool:
    """Whether a line has a word about a failure or an end."""
    return any(one.search(text) for one in (BAD_NEWS, ENDS, EXCEPTION))


def is_harmless(text: str) -> bool:
    """Whether a line is no failure by its wording: news, progress, a setting, something that is tried again."""
    if any(one.search(text) for one in (HARMLESS, PROGRESS, RETRIED)) or SETTING.match(text):
        return True
    return BAD_NEWS.search(text) is None


def is_warning(text: str) -> bool:
    """Whether a line is marked as a warning or news, and is from no part that marks failures so."""
    return PASSING.search(text) is not None and SERIOUS.search(text) is None
