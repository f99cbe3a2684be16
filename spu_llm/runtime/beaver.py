"""Stock SPU with a third party's multiplication triples: the client's side of `spu_llm.dealer.beaver`.

    beaver = BeaverConfig(address="dealer.example:9449", public_key="beaver.pub")
    config = libspu.RuntimeConfig(protocol=libspu.ProtocolKind.SEMI2K, field=libspu.FieldType.FM64)
    runtime = spu.Runtime(link, with_third_party(config, beaver, parties=2))  # at every party, with equal settings

SPU's wheel cannot set or read `RuntimeConfig.ttp_beaver_config` as an attribute (setting raises, reading frees it twice), so it is
parsed in. For a SecretFlow SPU device put `settings(beaver)` into `cluster_def["runtime_config"]`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from spu import libspu

from ..errors import UserError
from ..network.certificates import Identity


class BeaverConfig(BaseModel):
    """Which Beaver server the parties of a SEMI2K session use. All parties need the same one, and the same adjust rank."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str
    """HOST:PORT of `spu-llm beaver`."""

    public_key: Path
    """The file that the server writes, from a source that the parties trust: who can replace it is the dealer."""

    adjust_rank: int = 0
    """The party that talks to the server: 0 is the client."""

    transport: Literal["http", "h2"] = "http"
    """HTTP/1.1 or HTTP/2, of which SPU's client takes at most 256 KB ahead of its reading: slow for much data over long
    distances."""


def settings(beaver: BeaverConfig, identity: Identity | None = None) -> dict[str, Any]:
    """SPU's settings, as in its JSON; with an identity, this party's own, for mutual TLS.

    UserError if a file is missing or not in order.
    """
    try:
        public_key = beaver.public_key.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"beaver.public_key {beaver.public_key}: {error}; name the file that the server wrote") from None
    found: dict[str, Any] = {
        "server_host": beaver.address,
        "adjust_rank": beaver.adjust_rank,
        "asym_crypto_schema": "SM2",
        "server_public_key": public_key,
        "transport_protocol": beaver.transport,
    }
    if identity:
        identity.check()
        found["ssl_config"] = {
            "ca_file_path": str(identity.ca),
            "certificate": str(identity.certificate),
            "private_key": str(identity.key),
            "verify_depth": 1,  # brpc does not verify at all where this is 0, its default
        }
    return {"beaver_type": "TrustedThirdParty", "ttp_beaver_config": found}


def with_third_party(
    config: libspu.RuntimeConfig, beaver: BeaverConfig, parties: int, identity: Identity | None = None
) -> libspu.RuntimeConfig:
    """A copy of `config` that takes triples from the server. UserError for an adjust rank that is no party's.

    SPU does not check the rank: nobody would ask the server, and results would be wrong without an error.
    """
    if not 0 <= beaver.adjust_rank < parties:
        raise UserError(f"beaver.adjust_rank is {beaver.adjust_rank}; {parties} parties have ranks 0 to {parties - 1}")
    added, both = libspu.RuntimeConfig(), libspu.RuntimeConfig()
    added.ParseFromJsonString(json.dumps(settings(beaver, identity)))
    both.ParseFromString(config.SerializeToString() + added.SerializeToString())  # Protobuf merges what is joined
    return both
