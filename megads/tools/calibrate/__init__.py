"""`megads calibrate`: what this machine's products, memory and collectives reach, as a device file for planning."""

__all__ = ["config", "measure"]
