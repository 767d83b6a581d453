"""Texts for checking token estimates: generated ones of every kind, and the texts inside the
corpus.

Tests and `benchmarks/calibrate_tokens.py` use them.
"""

from __future__ import annotations

import base64
import json
import random
import string
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ENGLISH = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man"
)
_NAMES = (
    "getUserName parse_config HttpClient self request response userId index buffer handler callback options "
    "createElement isValid maxRetries onError sessionStore eventLoop _private __init__ DEFAULT_TIMEOUT fs readFile"
)
ENGLISH, NAMES = _ENGLISH.split(), _NAMES.split()
WORDS = {
    "russian": "это был человек который время если когда работа система данные файл ошибка пользователь может быть "
    "после сервер запрос ответ новый каждый должен можно нельзя потому что результат значение память",
    "ukrainian": "це був чоловік який час якщо коли робота система дані файл помилка користувач може бути після "
    "сервер запит відповідь новий кожен повинен можна результат значення",
    "arabic": "هذا كان الوقت الذي إذا عندما العمل النظام البيانات الملف خطأ المستخدم يمكن أن يكون بعد الخادم طلب "
    "جديد كل يجب لأن النتيجة القيمة الذاكرة في من على إلى",
    "greek": "αυτό ήταν ο χρόνος που όταν εργασία σύστημα δεδομένα αρχείο σφάλμα χρήστης μπορεί να είναι μετά νέο "
    "κάθε πρέπει γιατί αποτέλεσμα τιμή μνήμη και στο από",
    "hebrew": "זה היה הזמן אם כאשר עבודה מערכת נתונים קובץ שגיאה משתמש יכול להיות אחרי שרת בקשה תשובה חדש כל צריך כי",
    "hindi": "यह समय जब काम डेटा फ़ाइल त्रुटि उपयोगकर्ता सकता है बाद सर्वर अनुरोध उत्तर नया हर चाहिए क्योंकि परिणाम मान",
    "korean": "이것은 시간이 만약 때 작업 시스템 데이터 파일 오류 사용자 수 있습니다 후에 서버 요청 응답 새로운 결과",
    "german": "das war die Zeit wenn Arbeit Daten Datei Fehler Benutzer kann sein nach Anfrage Antwort neu jede muss "
    "weil Ergebnis Wert Speicher für über können müssen größer",
    "french": "c'était le temps quand travail système données fichier erreur utilisateur peut être après serveur "
    "requête réponse nouveau chaque doit parce que résultat valeur mémoire à où",
    "vietnamese": "đây là thời gian khi công việc hệ thống dữ liệu tệp lỗi người dùng có thể sau máy chủ yêu cầu trả "
    "lời mới mỗi phải vì kết quả giá trị bộ nhớ",
}
UNSPACED = {
    "chinese": "这个 时间 如果 工作 系统 数据 文件 错误 用户 可以 服务器 请求 我们 没有 问题 结果 的 是 在 了 和 ， 。",
    "traditional chinese": "這個 時間 如果 工作 系統 資料 檔案 錯誤 使用者 可以 伺服器 請求 我們 沒有 結果 的 ， 。",
    "japanese": "これは 時間 です。 もし 作業 システム データ ファイル エラー ユーザー できます が の を に 結果 、",
    "thai": "นี่ คือ เวลา ถ้า งาน ระบบ ข้อมูล ไฟล์ ข้อผิดพลาด ผู้ใช้ สามารถ หลังจาก เซิร์ฟเวอร์ คำขอ ใหม่ ทุก ต้อง ผลลัพธ์",
}
EMOJI = "🎉🚀✅❌🔥💡👍😀😂🙏🎯📦🔧🐛✨🟢🔴📝"


def samples(seed: int = 0, size: int = 20_000) -> dict[str, str]:
    """Text of about `size` characters for each of many kinds of content, the same for the same
    seed."""
    rng = random.Random(seed)
    pick, printable = rng.choice, string.printable[:94]

    def chars(alphabet: str, length: int) -> str:
        return "".join(rng.choices(alphabet, k=length))

    def lines(make: Any, sep: str = "\n") -> str:
        out: list[str] = []
        length = 0
        while length < size:
            out.append(make(len(out)))
            length += len(out[-1]) + len(sep)
        return sep.join(out)

    def words(count: int) -> str:
        return " ".join(rng.choices(ENGLISH, k=count))

    def stamp() -> str:
        return f"2025-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}T{rng.randrange(24):02}:{rng.randrange(60):02}:07.{rng.randrange(1000):03}Z"

    def statement(_: int) -> str:
        a, b, c, d = rng.choices(string.ascii_lowercase, k=4)
        return pick([
            f"function {a}({b},{c}){{return {d}.{pick(NAMES)}({a}[{rng.randrange(99)}])}}",
            f'var {a}={b}?{c}:"{pick(ENGLISH)}",{d}=!0;',
            f"if({a}===void 0)for(;{b}<{c}.length;)({d}++,{a}&&{b}());",
        ])  # fmt: skip

    def code_line(_: int) -> str:
        return "    " * rng.randrange(4) + pick([
            f"def {pick(NAMES)}(self, {pick(ENGLISH)}):", f"if {pick(NAMES)} is None:", "", f"# {words(6)}",
            f"return self.{pick(NAMES)}[{rng.randrange(9)}]", f'{pick(NAMES)} = {pick(NAMES)}("{pick(ENGLISH)}")',
        ])  # fmt: skip

    def record(_: int) -> dict[str, object]:
        return {
            name: pick([rng.randrange(1000), pick(ENGLISH), None, True, rng.random()])
            for name in NAMES[:6]
        }

    records = [record(n) for n in range(size // 150)]
    code = lines(code_line)
    out = {
        "english": lines(lambda _: words(9).capitalize() + ".", " "),
        "base64": base64.b64encode(rng.randbytes(size * 3 // 4)).decode(),
        "wrapped base64": base64.encodebytes(rng.randbytes(size * 3 // 4)).decode(),
        "hex": rng.randbytes(size // 2).hex(),
        "digests": lines(lambda _: rng.randbytes(32).hex()),
        "hex dump": lines(lambda n: f"{n * 16:08x}  {rng.randbytes(16).hex(' ')}  |{chars(printable, 16)}|"),
        "uuids": lines(lambda _: str(uuid.UUID(bytes=rng.randbytes(16)))),
        "random letters": chars(string.ascii_lowercase, size),
        "random words": lines(lambda _: chars(string.ascii_lowercase, rng.randrange(2, 12)), " "),
        "random printable": chars(printable, size),
        "digits": chars(string.digits, size),
        "floats": lines(lambda _: ",".join(f"{rng.gauss(0, 100):.6f}" for _ in range(8))),
        "csv": lines(lambda n: f"{n},{pick(ENGLISH)},{rng.randrange(10**5)},{rng.random():.3f},{stamp()[:10]},N/A"),
        "log": lines(lambda _: f"{stamp()} {pick(['INFO', 'WARN', 'ERROR'])} [worker-{rng.randrange(16)}] {pick(NAMES)}: {words(6)} id={rng.randrange(10**6)} took {rng.randrange(900)}ms"),
        "access log": lines(lambda _: f'10.{rng.randrange(255)}.{rng.randrange(255)}.7 - - [12/Mar/2025:10:{rng.randrange(60):02}:09 +0000] "GET /{pick(ENGLISH)}/{rng.randrange(9999)} HTTP/1.1" 200 {rng.randrange(99999)} "-" "curl/8.1"'),
        "stack trace": lines(lambda _: f'  File "/srv/{pick(ENGLISH)}/{pick(NAMES)}.py", line {rng.randrange(900)}, in {pick(NAMES)}'),
        "minified javascript": lines(statement, ""),
        "code": code,
        "code in json": json.dumps(code),
        "tabs": lines(lambda _: "\t" * rng.randrange(1, 6) + f"{pick(NAMES)} := {pick(NAMES)}.{pick(NAMES)}()"),
        "whitespace": lines(lambda _: " " * rng.randrange(1, 40) + pick(["", "\n", "\t", "\n\n", pick(ENGLISH)]), ""),
        "aligned table": lines(lambda _: f"{pick(ENGLISH):<20}{rng.randrange(10**6):>12}  {pick(NAMES):<30}|"),
        "markdown": lines(lambda _: pick([f"## {words(3).title()}", f"- **{pick(ENGLISH)}** `{pick(NAMES)}`", f"| {pick(ENGLISH)} | {pick(ENGLISH)} |", "|---|---|", f"> {words(8)}", ""])),
        "xml": lines(lambda n: f'<row id="{n}"><{pick(NAMES)} type="{pick(ENGLISH)}">{words(2)}</{pick(NAMES)}></row>'),
        "urls": lines(lambda _: f"https://{pick(ENGLISH)}.example.org/{pick(ENGLISH)}/{chars(string.ascii_letters, 11)}?v={rng.randrange(99)}"),
        "paths": lines(lambda _: "./" + "/".join(rng.choices(ENGLISH + NAMES, k=rng.randrange(2, 7))) + ".py"),
        "indented json": json.dumps(records, indent=2),
        "minified json": json.dumps(records, separators=(",", ":")),
        "json in json": json.dumps(json.dumps(records)),
        "terminal colours": lines(lambda _: f"\x1b[{rng.randrange(30, 38)}m{pick(ENGLISH)}\x1b[0m {pick(NAMES)} ({rng.randrange(99)} ms)"),
        "emoji": chars(EMOJI, size),
        "emoji in text": lines(lambda _: pick(ENGLISH) if rng.random() < 0.8 else pick(EMOJI), " "),
    }  # fmt: skip
    for name, listed in WORDS.items():
        out[name] = " ".join(rng.choices(listed.split(), k=size // 6))
    for name, listed in UNSPACED.items():
        out[name] = "".join(rng.choices(listed.split(), k=size // 2))
    return out


def corpus_files(folder: Path) -> list[Path]:
    """The files of the corpus that tests use. Its recorded runs and wire traffic are for
    benchmarks."""
    parts = ("content", "retrieval", "transcripts")
    return sorted(path for part in parts for path in (folder / part).rglob("*") if path.is_file())


def corpus_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """The name and text of each corpus file that tests use, and of the tool results and documents
    inside them."""
    for path in corpus_files(folder):
        name, text = path.relative_to(folder).as_posix(), path.read_bytes().decode()
        yield name, text
        if name.startswith("transcripts/"):
            values = (
                map(json.loads, filter(str.strip, text.split("\n")))
                if path.suffix == ".jsonl"
                else [json.loads(text)]
            )
            for number, result in enumerate(found for value in values for found in _results(value)):
                yield f"{name} result {number}", result
        elif path.name == "codebase_chunks.json":
            for document in json.loads(text):
                yield (
                    f"{name} {document['doc_id']}",
                    "\n".join(chunk["content"] for chunk in document["chunks"]),
                )


def _results(value: Any) -> Iterator[str]:
    """The texts of tool results anywhere in a message, in each format that the corpus contains."""
    if isinstance(value, list):
        for item in value:
            yield from _results(item)
    elif isinstance(value, dict):
        if value.get("type") == "tool_result" or value.get("role") in ("tool", "toolResult"):
            content = value.get("content") or []
            for block in [{"text": content}] if isinstance(content, str) else content:
                yield block["text"] if "text" in block else json.dumps(block)
        for item in value.values():
            yield from _results(item)
