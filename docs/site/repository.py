"""An MkDocs hook that adds files of the repository outside docs/ to the site.

The Markdown pages in the repository's root become pages of the site. Any other file that a page
links to becomes a page that shows its text. Links are relative to the file that contains them, so
that they work on GitHub and in a checkout. This hook rewrites them for the site.
"""

import posixpath
import re
from operator import itemgetter
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_SOURCES = {page: source for source, page in ROOT_PAGES.items()}
# Code, whose brackets are not links, or a link up to its anchor or end.
_LINK = re.compile(
    r"^```.*?^```|`[^`\n]+`|(\]\()(?![a-z]+:|[#/])([^)#\s]+)", re.MULTILINE | re.DOTALL
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    linked = {path: file for file in files.documentation_pages() for path in _outside(file)}
    for path, file in sorted(linked.items(), key=itemgetter(0)):
        if not (root / path).is_file():
            raise PluginError(f"{_source(file)}: link to {path}, which is not a repository file")
        files.append(File.generated(config, _site_path(path), content=_listing(root, path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # it would contain this page only
    here = posixpath.dirname(page.file.src_uri) or "."

    def rewritten(found: re.Match[str]) -> str:
        if found[2] is None:
            return found[0]
        return found[1] + posixpath.relpath(_site_path(_target(page.file, found[2])), here)

    return _LINK.sub(rewritten, markdown)


def _outside(file: File) -> set[str]:
    """The files that a page links to and that the site does not contain otherwise."""
    links = (found[2] for found in _LINK.finditer(file.content_string))
    targets = {_target(file, link) for link in links if link}
    return {path for path in targets if _site_path(path).startswith("repository/")}


def _source(file: File) -> str:
    """The path, relative to the repository's root, of a page's source file."""
    return _SOURCES.get(file.src_uri, f"docs/{file.src_uri}")


def _target(file: File, link: str) -> str:
    """The path, relative to the repository's root, of the target of a link in `file`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_source(file)), link))


def _site_path(path: str) -> str:
    """The path, relative to docs/, of the page or file that shows the repository's `path`."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    is_page = path.startswith("docs/") and not path.endswith(".py")
    return path.removeprefix("docs/") if is_page else f"repository/{path}.md"


def _listing(root: Path, path: str) -> str:
    text = (root / path).read_text(encoding="utf-8")
    language = {".py": "python", ".yaml": "yaml", ".yml": "yaml"}.get(Path(path).suffix, "text")
    header = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n"
    return f"{header}\n~~~~~~{language}\n{text}\n~~~~~~\n"
