"""`spu-llm bench`: measurements of parts of a model."""

from __future__ import annotations

import click

from .bench_accuracy import accuracy_command
from .bench_keys import keys_command
from .bench_layer import layer_command
from .bench_network import network_command
from .bench_op import op_command
from .bench_passes import passes_command
from .bench_prompt import prompt_command
from .bench_quality import quality_command
from .bench_sampling import sampling_command
from .bench_sparse import sparse_command
from .bench_sparsity_leakage import sparsity_leakage_command
from .bench_tables import tables_command


@click.group("bench")
def bench_group() -> None:
    """Measure parts of a model: tables, or JSON."""


bench_group.add_command(accuracy_command)
bench_group.add_command(keys_command)
bench_group.add_command(layer_command)
bench_group.add_command(network_command)
bench_group.add_command(op_command)
bench_group.add_command(passes_command)
bench_group.add_command(prompt_command)
bench_group.add_command(quality_command)
bench_group.add_command(sampling_command)
bench_group.add_command(sparse_command)
bench_group.add_command(sparsity_leakage_command)
bench_group.add_command(tables_command)
