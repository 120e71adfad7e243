"""The ground: environment, process groups, files, locks, the hook protocol, errors of a process."""
