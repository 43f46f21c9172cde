"""PDF files for tests."""

import io

import pypdf
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

PAGES = ("The first page.", "The second page.")


def pdf(pages=PAGES, password=None, letters=None) -> bytes:
    """A PDF with a line of text on each page. An empty line makes an empty page.

    Args:
        pages: the lines.
        password: encrypts the file.
        letters: what some letters stand for, as UTF-16: `{"A": 0xD83D}`.
    """
    writer = pypdf.PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
    if letters:
        pairs = "\n".join(f"<{ord(letter):02X}> <{unit:04X}>" for letter, unit in letters.items())
        table = DecodedStreamObject()
        head = f"1 begincodespacerange\n<00> <FF>\nendcodespacerange\n{len(letters)} beginbfchar\n"
        table.set_data(f"{head}{pairs}\nendbfchar".encode())
        font[NameObject("/ToUnicode")] = writer._add_object(table)
    for line in pages:
        page = writer.add_blank_page(200, 200)
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 10 100 Td ({line}) Tj ET".encode())
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = writer._add_object(content)
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


LARGE = ["x) Tj (" * 2000] * 100  # pages that take pypdf more than ten seconds
