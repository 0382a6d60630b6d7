"""Hooks of MkDocs: the version in the footer, and each notebook as a page of Markdown, with its outputs as stored.

The page of `notebooks/compose.ipynb` is `notebooks/compose.md`, so that links, the search and the colors of code are
those of the site. The notebook itself is there to be downloaded.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert.exporters import MarkdownExporter

import kvpolicy


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """The page of a notebook in Markdown, and its figures by the names that the page gives them."""
    text, resources = MarkdownExporter().from_filename(str(path), {"unique_key": path.stem})
    return f"{text}\n\n[Download this notebook]({path.name})\n", dict(resources["outputs"])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show in the footer which version the site describes."""
    config.copyright = f"kvpolicy {kvpolicy.__version__}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page and the figures of each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        source = PurePosixPath(file.src_uri)
        text, figures = page_of(Path(str(file.abs_src_path)))
        files.append(File.generated(config, str(source.with_suffix(".md")), content=text))
        for name, content in figures.items():
            files.append(File.generated(config, str(source.parent / name), content=content))
    return files
