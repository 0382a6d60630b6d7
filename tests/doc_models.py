"""Models that pages load from the hub, as folders that the embedded model is copied to.

`from_pretrained("Qwen/Qwen2.5-7B-Instruct")` reads a folder of this name below the working folder if there is one, so
that the code of a page runs unchanged: what it calls is real, and only the weights are others.
"""

from __future__ import annotations

import re
import shutil
from importlib.resources import as_file, files
from pathlib import Path

HUB = re.compile(r'"((?:meta-llama|mistralai|Qwen|google|microsoft|EleutherAI|openai-community|NousResearch)/[\w.-]+)"')
"""Names of models of the hub."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"


def stand_in(code: str, folder: Path) -> None:
    """Copy the embedded model, with a chat template, to each name of the hub in a piece of code."""
    for name in HUB.findall(code):
        if not (folder / name).is_dir():
            with as_file(files("kvpolicy") / "assets" / "tiny") as embedded:
                shutil.copytree(embedded, folder / name)
            (folder / name / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
