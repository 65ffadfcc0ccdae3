"""What MkDocs does besides: formulas become MathML, and the colours of code become a stylesheet."""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from pygments.formatters import HtmlFormatter

# What pymdownx.arithmatex leaves of $...$ and of $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace each formula by MathML, which browsers draw without a script."""

    def mathml(match: re.Match) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return _FORMULA.sub(mathml, content)


def on_post_build(config: Any) -> None:
    """Append the colours of code to the stylesheet."""
    with (Path(config.site_dir) / "style.css").open("a") as file:
        file.write(HtmlFormatter(style="xcode").get_style_defs(".highlight"))
