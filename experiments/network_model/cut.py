"""Writes the first layers of a GGUF model as a GGUF model: tokenizer, embedding and final norm stay as they are.

    python experiments/network_model/cut.py FILE.gguf 6 OUT.gguf

What such a model says is of no use; what its layers cost is what the whole model's layers cost.
"""

import re
import sys
from pathlib import Path

import gguf


def cut(source: Path, layers: int, out: Path) -> None:
    """Copy metadata and tensors as they are, but for the number of blocks."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = layers if name == f"{architecture}.block_count" else field.contents()
        array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, value, field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        if block is None or int(block[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    cut(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
