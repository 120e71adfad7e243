"""The health check of nodes: what each measures, how pairs exchange data, and which are not fit to train."""
