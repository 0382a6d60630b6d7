"""A hook of MkDocs: each notebook of the docs is a page of Markdown, with its outputs as they are stored.

The page of `notebooks/compose.ipynb` is `notebooks/compose.md`, so that links, the search and the colors of code are
those of the site. The notebook itself is there to be downloaded.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert.exporters import MarkdownExporter


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page and the figures of each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        source = PurePosixPath(file.src_uri)
        text, resources = MarkdownExporter().from_filename(str(file.abs_src_path), {"unique_key": source.stem})
        download = f"\n\n[Download this notebook]({source.name})\n"
        files.append(File.generated(config, str(source.with_suffix(".md")), content=text + download))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, str(source.parent / name), content=content))
    return files
