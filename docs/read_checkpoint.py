"""Reads a checkpoint of format version 3 without megads: python read_checkpoint.py runs/x/checkpoints/step_00000100

Needs torch, safetensors and xxhash. `tensors` gives every tensor whole, assembled from the files of all ranks.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open


def manifest(folder: Path) -> dict:
    text = (folder / "manifest.json").read_bytes()
    found = json.loads(text)
    if found["format_version"] != 3:
        raise SystemExit(f"{folder}: format version {found['format_version']}, this reads 3")
    line, contents = text.split(b"\n", 1)
    if xxhash.xxh3_128_hexdigest(contents) != found["contents"]:
        raise SystemExit(f"{folder}: manifest.json is damaged")
    if xxhash.xxh3_128_hexdigest(line[: line.index(b', "checksum"')]) != found["checksum"]:
        raise SystemExit(f"{folder}: the first line of manifest.json is damaged")
    return found


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor by its key: weight/<name>, exp_avg/<name> or exp_avg_sq/<name> for AdamW."""
    found, files = manifest(folder), {}
    for name, record in found["files"].items():
        with (folder / name).open("rb") as file:
            length = file.read(8)
            header = length + file.read(int.from_bytes(length, "little"))
        if xxhash.xxh3_128_hexdigest(header) != record["header"]:
            raise SystemExit(f"{folder / name}: its header is damaged")
        files[name] = safe_open(folder / name, framework="pt")
    for key, record in found["tensors"].items():
        whole = None
        for rank in record["files"]:
            file = files[f"rank_{rank:05d}.safetensors"]
            for name, text in file.metadata().items():
                # The name of a part is <key>@<first index in each dim>.
                found_key, _, place = name.rpartition("@")
                if found_key != key:
                    continue
                part, about = file.get_tensor(name), json.loads(text)
                if xxhash.xxh3_128_hexdigest(part.contiguous().view(-1).view(torch.uint8).numpy()) != about["xxh3_128"]:
                    raise SystemExit(f"{folder}: {name} is damaged")
                offset = [int(index) for index in place.split(",") if index]
                whole = torch.empty(about["global_shape"], dtype=part.dtype) if whole is None else whole
                whole[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
        yield key, whole


if __name__ == "__main__":
    for key, tensor in tensors(Path(sys.argv[1])):
        sys.stdout.write(f"{key}  {tuple(tensor.shape)}  {tensor.dtype}  norm {tensor.double().norm():.6g}\n")
