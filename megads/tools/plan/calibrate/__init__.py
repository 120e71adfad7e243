"""`megads calibrate`: measures GEMMs, memory and collectives of this machine and writes a device file for planning."""

__all__ = ["config", "measure"]
