"""Elements of HTML: what is text stays text."""

from html.parser import HTMLParser

from meshdsl.reports.explain.html.elements import (
    Cell,
    Column,
    Html,
    byte_cell,
    code,
    joined,
    line,
    place,
    table,
    tag,
    ticked,
)
from meshdsl.tracing.source import UNKNOWN, Source

EVIL = '<img src=x onerror="alert(1)">&amp;\'"'


class Reader(HTMLParser):
    """Collects text, tags and attributes."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.attributes = "", [], {}
        self.feed(text)

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes.update(attributes)


def test_text_and_attributes_are_escaped_and_read_back_as_they_were():
    found = Reader(tag("p", EVIL, title=EVIL, data_x=EVIL))
    assert found.tags == ["p"] and found.text == EVIL
    assert found.attributes == {"title": EVIL, "data-x": EVIL}


def test_markup_is_not_escaped_twice():
    inner = tag("b", "a < b")
    assert str(tag("p", inner, None, ["c", inner])) == ("<p><b>a &lt; b</b>c<b>a &lt; b</b></p>")
    assert isinstance(joined(["x"]), Html)


def test_attributes_that_are_none_or_false_are_left_out():
    found = tag("td", class_=None, hidden=False, open=True, data_order=0.1, colspan=2)
    assert str(found) == '<td open data-order="0.1" colspan="2"></td>'


def test_elements_without_content_are_closed_as_their_language_asks():
    assert str(tag("input", type="search")) == '<input type="search">'
    assert str(tag("path", d="M0 0")) == '<path d="M0 0"/>'


def test_code_breaks_behind_slashes_only():
    assert str(code("a/<b>/c")) == "<code>a/<wbr>&lt;b&gt;/<wbr>c</code>"
    assert Reader(code(EVIL)).text == EVIL


def test_a_place_shows_the_text_of_its_line(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("x = 1\ny = x < 2\n")
    found = Reader(place(Source(str(file), 2, backward=True)))
    assert found.text.endswith("model.py:2 (backward)")
    assert found.attributes["title"] == "y = x < 2"
    assert Reader(place(Source(str(file), 2, backward=True), phase=False)).text.endswith(":2")
    assert Reader(place(UNKNOWN)).text == "–"


def test_a_table_has_heads_that_sort_cells_with_their_order_and_totals():
    columns = [Column("name"), Column("bytes", number=True, total=True)]
    text = str(table("sizes", columns, [(EVIL, byte_cell(1024)), ("b", Cell("2 KiB", 2048))]))
    found = Reader(text)
    assert found.tags.count("button") == 2 and found.tags.count("input") == 1
    assert 'data-order="1024"' in text and "3.0 KiB" in found.text and EVIL in found.text
    one_row = str(table("sizes", columns, [("a", byte_cell(1))]))
    assert "<input" not in one_row and "<tfoot" not in one_row


def test_words_in_backticks_are_code():
    assert ticked("`x` is < `a/b`") == "<code>x</code> is &lt; <code>a/<wbr>b</code>"
    assert ticked("one ` alone") == "one ` alone"


def test_a_line_shows_its_place_and_its_text():
    source = Source(__file__, 1)
    shown = line(source)
    assert (
        source.place in shown.replace("<wbr>", "")
        and 'class="says"' in shown
        and "&quot;&quot;&quot;" in shown
    )
    assert "says" not in line(Source("nowhere.py", 3)) and "–" in line(Source("?", 0))
