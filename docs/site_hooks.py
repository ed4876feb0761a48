"""Pages of the site that stand elsewhere in the repository: its README, the benchmarks' and
CONTRIBUTING.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
}
"""File of each such page, by its name in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links as the site has them."""
    for name, path in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_with_links(text)))
        for image in re.findall(r"\]\((results/[^)]*\.png)\)", text):
            files.append(
                File.generated(config, image, abs_src_path=str(ROOT / "benchmarks" / image))
            )
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Lead links from the pages of ``docs`` to those that are added here; a folder of options
    becomes their names.
    """
    markdown = re.sub(r"\[conf/(\w+)\]\(\.\./conf/\w+\)", _names, markdown)
    return markdown.replace("](../benchmarks/README.md", "](benchmarks.md")


def _names(link: re.Match[str]) -> str:
    return " ".join(f"`{path.stem}`" for path in sorted((ROOT / "conf" / link[1]).glob("*.yaml")))


def _with_links(text: str) -> str:
    """The text with links into ``docs`` and to the other pages as they are within the site."""
    text = re.sub(r"\]\((?:\.\./)?docs/cluster/\)", "](cluster/README.md)", text)
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    text = text.replace("](benchmarks/)", "](benchmarks.md)").replace(
        "](benchmarks/README.md", "](benchmarks.md"
    )
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)")
