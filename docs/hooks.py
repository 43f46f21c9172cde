"""Hooks of mkdocs: pages show pictures of notebooks/pictures, which lies outside docs/."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PICTURES = Path(__file__).resolve().parent.parent / "notebooks" / "pictures"
OUTSIDE = "../../notebooks/pictures/"  # as pages of docs/benchmarks/ name the folder, so that GitHub shows them too


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures to the files of the site."""
    for path in sorted(path for path in PICTURES.iterdir() if path.suffix in (".svg", ".png")):
        files.append(File.generated(config, f"pictures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the pages show the pictures of the site."""
    return markdown.replace(f"]({OUTSIDE}", "](../pictures/")
