"""What charts share, those of `bench serve` and of the documentation: a card with title and note, light and dark."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 760
TITLE = ".title{font-size:15px;font-weight:600}"
STYLE = """
.card{{fill:#fff;stroke:#d0d7de}}.text{{fill:#1f2328}}.soft{{fill:#59636e}}{light}
text{{font:13px -apple-system,"Segoe UI","Noto Sans",Helvetica,Arial,sans-serif}}{title}
{both}
@media(prefers-color-scheme:dark){{
.card{{fill:#0d1117;stroke:#3d444d}}.text{{fill:#f0f6fc}}.soft{{fill:#9198a1}}{dark}}}
"""


def card(
    title: str, note: str, description: str, height: int, parts: Sequence[str], styles: tuple[str, str, str]
) -> str:
    """A picture with a background of its own. `description` is for who does not see it; `styles`: light, dark, both."""
    light, dark, both = styles
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'role="img">',
            f"<title>{title}. {description}</title>",
            f"<style>{STYLE.format(light=light, dark=dark, both=both, title=TITLE)}</style>",
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            f'<text class="text title" x="20" y="32">{title}</text>',
            f'<text class="soft" x="20" y="53">{note}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )
