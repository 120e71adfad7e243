"""The only room that imports deepspeed: joins stages, grid, schedule and optimizer."""
