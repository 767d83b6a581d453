"""Secrets are masked in summaries, previews, lists, hits, errors and exports, and exact in what
`get` returns.

The canaries are assembled here, so that no scanner reports this file as a leak."""

import base64
import io
import json
import logging
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import Store, ToolCall, ToolExecutor
from coatcheck.cli import main
from coatcheck.executor import ToolError
from coatcheck.ids import clip
from coatcheck.previews import EDGE, Sample, preview
from coatcheck.redaction import (
    MARK,
    Secret,
    find_secrets,
    is_suspect,
    mask,
    mask_url,
    mask_value,
)
from coatcheck.redaction.rules import RULES, Rule
from tests.backends import Backend

HEX = "0123456789abcdef"
MIXED = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA" * 4
UPPER = "AB3DE5GH7JK9MN1PQ2RS4TU6VW8XY0ZA" * 2
ESC = "\x1b"
BODY = "\n".join(
    "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7" + letter * 12 for letter in "abcdefgh"
)
FENCE = "-" * 5


def armoured(kind: str, body: str = BODY) -> str:
    return f"{FENCE}BEGIN {kind}{FENCE}\n{body}\n{FENCE}END {kind}{FENCE}"


# The kind of secret, a text that contains it, and the secret.
CANARIES: dict[str, tuple[str, str]] = {
    name: (text.replace("§", secret), secret)
    for name, text, secret in (
        ("aws key id", "using § now", "AKIA" + "QX3EXAMPLE7ABCDE"[:7] + "ABCDEFGHI"),
        ("aws temporary key id", "id=§;", "ASIA" + "ABCDEFGHIJKLMNOP"),
        ("aws secret", "aws_secret_access_key = §\n", MIXED[:20] + "/" + MIXED[20:39]),
        ("aws session token", "export AWS_SESSION_TOKEN=§\n", "FwoG" + MIXED),
        ("google key", "?key=§&x=1", "AI" + "za" + MIXED[:35]),
        ("google oauth", "access § here", "ya" + "29." + MIXED[:60]),
        (
            "service account",
            '{"private_key": "§"}',
            armoured("PRIVATE" + " KEY").replace("\n", "\\n"),
        ),
        ("azure storage", "AccountName=x;AccountKey=§;EndpointSuffix=y", MIXED[:86] + "=="),
        ("azure sas", "https://x.blob.example/c?sv=2020-01-01&sig=§&se=2030", MIXED[:43] + "%3D"),
        ("azure client secret", "value § end", "abc" + "8" + "Q~" + MIXED[:34]),
        ("github", "remote: § ok", "gh" + "p_" + MIXED[:36]),
        ("github fine-grained", "with §.", "github" + "_pat_" + MIXED[:22] + "_" + MIXED[:59]),
        ("webhook secret", "set § here", "wh" + "sec_" + MIXED[:32]),
        ("docker", "login with § now", "dckr" + "_pat_" + MIXED[:27]),
        ("supabase secret", "use § now", "sb" + "_secret_" + MIXED[:31]),
        ("fly macaroon", "use § now", "fm" + "1r_" + MIXED[:60]),
        ("fly organisation", "use § now", "fo" + "1_" + MIXED[:43]),
        ("cloudflare key", "use § now", "cf" + "k_" + MIXED[:40]),
        ("cloudflare origin", "use § now", "v1" + ".0-" + HEX + HEX[:8] + "-" + HEX * 8),
        ("sonar", "use § now", "sq" + "p_" + HEX * 2 + HEX[:8]),
        ("neon", "use § now", "na" + "pi_" + MIXED.lower()[:60]),
        ("prefect", "use § now", "pn" + "u_" + MIXED[:36]),
        ("sourcegraph", "use § now", "sg" + "p_" + HEX + "_" + HEX * 2 + HEX[:8]),
        ("brevo smtp", "use § now", "xsmtp" + "sib-" + HEX * 4 + "-" + MIXED[:16]),
        ("gitlab deploy", "use § now", "gl" + "dt-" + MIXED[:20]),
        ("gitlab scim", "use § now", "gl" + "soat-" + MIXED[:20]),
        ("nvidia", "use § now", "nv" + "api-" + MIXED[:60]),
        ("google client secret", "use § now", "GOC" + "SPX-" + MIXED[:28]),
        ("age", "use § now", "AGE-SECRET" + "-KEY-1" + MIXED.upper()[:58]),
        (
            "discord webhook",
            "POST https://§",
            "discord" + ".com/api/webhooks/123456789012345678/" + MIXED[:60],
        ),
        (
            "old discord webhook",
            "POST https://§",
            "discordapp" + ".com/api/webhooks/123456789012345678/" + MIXED[:60],
        ),
        ("htpasswd sha", "user:§", "{SHA}" + MIXED[:27] + "="),
        ("gitlab", "PRIVATE-TOKEN: §", "gl" + "pat-" + MIXED[:20]),
        ("slack", "bot §\n", "xo" + "xb-" + "123456789012-" + MIXED[:24]),
        (
            "slack webhook",
            "POST https://§",
            "hooks." + "slack.com/services/T0000/B0000/" + MIXED[:24],
        ),
        ("stripe", "charge with §, please", "sk" + "_live_" + MIXED[:24]),
        ("openai", "client = OpenAI('§')", "sk" + "-proj-" + MIXED[:48]),
        ("anthropic", "x § y", "sk" + "-ant-api03-" + MIXED[:80]),
        ("hugging face", "login §", "hf" + "_" + MIXED[:34]),
        ("npm", "//registry.example/:_authToken=§", "np" + "m_" + MIXED[:36]),
        ("pypi", "upload -p §", "py" + "pi-AgEIcHlwaS5vcmc" + MIXED[:60]),
        ("sendgrid", "mail § sent", "S" + "G." + MIXED[:22] + "." + MIXED[:43]),
        ("twilio", "sid § used", "S" + "K" + HEX * 2),
        ("telegram", "bot § started", "123456789" + ":AA" + MIXED[:33]),
        (
            "jwt",
            "got § back",
            "ey" + "JhbGciOiJIUzI1NiJ9." + "ey" + "JzdWIiOiIxMjM0In0." + MIXED[:43],
        ),
        ("putty key", "PPK\n§\nend of it", f"Private-Lines: 8\n{BODY}"),
        ("rsa key", "before\n§\nafter", armoured("RSA PRIVATE" + " KEY")),
        ("ssh key", "before\n§\nafter", armoured("OPENSSH PRIVATE" + " KEY")),
        ("pgp key", "before\n§\nafter", armoured("PGP PRIVATE" + " KEY BLOCK")),
        ("url", "postgres://bob:§@db.example:5432/app", "s3cr" + "@t-Pa55"),
        ("redis url", "redis://:§@cache:6379/0", "Zx9-horse-Qq"),
        ("odbc", "Server=db;Database=x;User Id=sa;Password=§;Encrypt=yes", "Zx9.horse!Qq"),
        ("bearer", "curl -H 'Authorization: Bearer §' host", MIXED[:30]),
        (
            "basic",
            "Authorization: Basic §\r\n",
            base64.b64encode(b"bob:" + b"horse-battery").decode(),
        ),
        ("cookie", "Cookie: theme=dark; sid=§; lang=en", MIXED[:32]),
        ("set-cookie", "set-cookie: session=§; Path=/; HttpOnly", MIXED[:32]),
        ("env", "export DB_PASSWORD=§\n", "correct(horse),staple"),
        ("yaml", "db:\n  password: §\n  port: 5432", "Zx9horseQq"),
        ("json", '{"user": "bob", "password": "§"}', "hunter2"),
        ("json in json", '{"body": "{\\"token\\": \\"§\\"}"}', "Zx9horseQq1"),
        ("python", 'API_KEY: str = "§"', "Zx9horseQq1"),
        ("option", "deploy --token § --force", "Zx9horseQq1"),
        ("xml", "<db><Password>§</Password></db>", "Zx9horseQq"),
        ("curl", "curl -s -u bob:§ https://example.invalid/", "Zx9horseQq"),
        ("header", "X-Api-Key: §", HEX * 2),
        ("after a colour", f"{ESC}[33m§{ESC}[0m done", "gh" + "p_" + MIXED[:36]),
        ("coloured assignment", f"{ESC}[32mpassword{ESC}[0m={ESC}[31m§{ESC}[0m\n", "Zx9-horse-Qq"),
        ("coloured name", f"pass{ESC}[1mword{ESC}[0m: §", "Zx9-horse-Qq"),
        ("escaped colour", "\\u001b[33m§\\u001b[0m", "gh" + "p_" + MIXED[:36]),
        ("colour in a source", "\\x1b[1;32mDB_PASSWORD\\x1b[0m=§", "Zx9-horse-Qq"),
        ("pass", "DB_PASS=§\n", "Zx9-horse-Qq"),
        ("numbered pass", "SMTP_PASS2='§'", "Zx9-horse-Qq"),
        ("pass in json", '{"pass": "§"}', "Zx9-horse-Qq"),
        ("pass in camel case", "dbPass: §", "Zx9-horse-Qq"),
        ("bare pass", "user=bob pass=§ host=x", "Zx9-horse-Qq"),
        ("next line", "password:\n  §\nport: 1", "Zx9-horse-Qq"),
        ("next line of windows", "Password:\r\n§\r\n", "Zx9-horse-Qq"),
        ("next line in quotes", '"password":\n    "§",', "Zx9-horse-Qq"),
        ("next line in json", '{"x": "token:\\n  §\\nport: 5"}', "Zx9-horse-Qq"),
        ("yaml block", "db:\n  password: |\n    §\n  port: 5432\n", "Zx9-horse-Qq"),
        ("folded yaml block", "token: >-\n  §\nnext: 1", "Zx9horse\n  Qq12345678"),
        ("yaml block with blanks", "passphrase: |-\n    §\nx: 1", "correct horse 9 battery"),
        ("blanks in the environment", 'DB_PASSWORD="§"', "correct horse battery staple"),
        ("blanks in json", '{"password": "§"}', "My dog ate 7 shoes"),
        ("netrc", "machine example.org login bob password §\n", "letmein"),
        ("netrc on lines", "machine example.org\n  login bob\n  password §\n", "letmein"),
        ("netrc default", "default login anonymous password §", "letmein"),
        ("netrc in another order", "machine h password § login bob", "letmein"),
        ("words in json", '{"password": "§"}', "correct horse battery staple"),
        ("words after pass", 'DB_PASS="§"', "correct horse battery staple"),
        ("a strong word among words", 'password = "§"', "a b hunter2Xy9Qz c"),
        ("yaml block in a list", "- password: |\n    §\n  user: bob\n", "Zx9-horse-Qq"),
        ("tagged yaml block", "password: !!str |\n  §\nuser: bob\n", "Zx9-horse-Qq"),
        (
            "folded yaml block of words",
            "password: >-\n  §\nuser: bob\n",
            "correct horse\n  battery staple",
        ),
        (
            "folded yaml block that begins with words",
            "secret: >\n  §\nuser: bob\n",
            "some words\n  hunter2Xy9Qz",
        ),
        ("after an empty line", "API key:\n\n  §\nport: 1", MIXED[:32]),
        (
            "netrc in quotes",
            'machine example.org login bob password "§"\n',
            "correct horse 9 battery",
        ),
        ("netrc in json", '{"l":"machine example.org login bob password §"}', "letmein9"),
        (
            "netrc lines in json",
            '{"l":"machine x.org login bob password §\\nmachine y.org"}',
            "letmein9",
        ),
        ("pass without an underscore", "DBPASS=§\n", "Zx9-horse-Qq"),
        ("dockerfile", "FROM x\nENV DB_PASS §\nRUN y", "Zx9-horse-Qq"),
        ("kubernetes", "env:\n- name: DB_PASSWORD\n  value: §\n- name: X\n", "Zx9-horse-Qq"),
        ("kubernetes in quotes", '  - name: API_TOKEN\n    value: "§"\n', "Zx9-horse-Qq"),
        ("app settings", '<add key="ApiKey" value="§"/>', MIXED[:32]),
        ("property", '<property name="password" value="§"/>', "Zx9-horse-Qq"),
        ("wifi", 'ssid="home"\npsk="§"\n', "Zx9 horse Qq"),
        ("wifi without quotes", "psk=§", "hunter2Xy9Qz"),
        ("sshpass", "sshpass -p § ssh host", "hunter2Xy9Qz"),
        ("docker login", "docker login -u bob -p § registry.example", "hunter2Xy9Qz"),
        ("mysql", "mysql -uroot -p§ db", "hunter2Xy9Qz"),
        ("htpasswd", "bob:§\n", "$apr1$" + MIXED[:8] + "$" + MIXED[:22]),
        ("shadow", "root:§:19000:0:99999:7:::\n", "$6$" + MIXED[:8] + "$" + MIXED[:86]),
        ("url without a user", "git clone https://§@example.org/x.git", MIXED[:20]),
        ("query", "GET /a?access_token=§&x=1", MIXED[:12]),
        (
            "odbc with letters only",
            "Server=db;Database=x;User Id=sa;Password=§;Encrypt=yes",
            "HorseBatteryStaple",
        ),
        (
            "kubeconfig",
            "user:\n  client-certificate-data: x\n  client-key-data: §\n",
            "LS0tLS1CRUdJTiB" + MIXED,
        ),
        ("powershell", '$c = ConvertTo-SecureString "§" -AsPlainText -Force', MIXED[:24]),
        ("powershell by name", "ConvertTo-SecureString -String '§' -AsPlainText", MIXED[:24]),
        ("bitcoin", "importprivkey §", "5" + "JhDk6" + MIXED.replace("0", "")[:45]),
        ("compressed bitcoin", "importprivkey § label", "K" + "wDk6" + MIXED.replace("0", "")[:47]),
        (
            "telegram address",
            "https://api.telegram.org/bot§/getMe",
            "3104019874" + ":" + MIXED[:35],
        ),
        (
            "telegram file",
            "https://api.telegram.org/file/bot§/a.png",
            "3104019874" + ":" + MIXED[:35],
        ),
        ("domain user of a proxy", "HTTPS_PROXY=http://corp\\user:§@proxy:8080", "Zx9-horse-Qq"),
        ("fragment", "https://example.org/#access_token=§", MIXED[:12]),
        *(
            (name, "using § now", secret)
            for name, secret in (
                ("gitlab agent", "gl" + "agent-" + MIXED[:50]),
                ("gitlab runner", "GR" + "1348941" + MIXED[:20]),
                ("slack app", "xa" + "pp-1-A012-" + MIXED[:40]),
                ("stripe restricted", "r" + "k_live_" + MIXED[:24]),
                ("mailgun", "ke" + "y-" + HEX * 2),
                ("mailchimp", HEX * 2 + "-u" + "s12"),
                ("brevo", "xkey" + "sib-" + HEX * 4 + "-" + MIXED[:16]),
                ("digitalocean", "do" + "p_v1_" + HEX * 4),
                ("shopify", "shp" + "at_" + HEX * 2),
                ("square", "sq0" + "atp-" + MIXED[:22]),
                ("square access", "EA" + "AA" + MIXED[:60]),
                ("discord", "M" + MIXED[:25] + "." + MIXED[:6] + "." + MIXED[:38]),
                ("databricks", "da" + "pi" + HEX * 2),
                ("linear", "lin" + "_api_" + MIXED[:40]),
                ("notion", "nt" + "n_" + MIXED[:46]),
                ("older notion", "secret" + "_" + MIXED[:43]),
                ("postman", "PM" + "AK-" + HEX[:12] * 2 + "-" + (HEX * 3)[:34]),
                ("figma", "fig" + "d_" + MIXED[:43]),
                ("new relic", "NR" + "AK-" + UPPER[:27]),
                ("new relic licence", (HEX * 3)[:36] + "NR" + "AL"),
                ("grafana", "gl" + "sa_" + MIXED[:32] + "_" + HEX[:8]),
                ("grafana cloud", "gl" + "c_" + MIXED[:60]),
                ("vault recovery", "hv" + "r." + MIXED[:90]),
                ("terraform", MIXED[:14] + ".atl" + "asv1." + MIXED[:67]),
                ("doppler", "d" + "p.pt." + MIXED[:43]),
                ("doppler service", "d" + "p.st.prod." + MIXED[:43]),
                ("pulumi", "pu" + "l-" + (HEX * 3)[:40]),
                ("planetscale", "pscale" + "_tkn_" + MIXED[:43]),
                ("supabase", "sb" + "p_" + (HEX * 3)[:40]),
                ("vercel", "vc" + "p_" + MIXED[:56]),
                ("netlify", "nf" + "p_" + MIXED[:40]),
                ("cloudflare", "cf" + "ut_" + MIXED[:48]),
                ("dropbox", "s" + "l." + MIXED),
                ("newer dropbox", "s" + "l.u." + MIXED),
                ("airtable", "pa" + "t" + MIXED[:14] + "." + HEX * 4),
                ("heroku", "HR" + "KU-" + MIXED[:60]),
                ("sentry", "sntry" + "s_" + MIXED[:80]),
                ("perplexity", "ppl" + "x-" + MIXED[:48]),
                ("groq", "gs" + "k_" + MIXED[:52]),
                ("replicate", "r" + "8_" + MIXED[:37]),
                ("xai", "xa" + "i-" + MIXED[:80]),
                ("circleci", "CCI" + "PAT_" + MIXED[:50]),
                ("buildkite", "bk" + "ua_" + (HEX * 3)[:40]),
                ("rubygems", "ruby" + "gems_" + HEX * 3),
                ("langsmith", "lsv2" + "_pt_" + HEX * 2 + "_" + HEX[:10]),
                ("pinecone", "pc" + "sk_" + MIXED[:60]),
                ("posthog", "ph" + "x_" + MIXED[:44]),
                ("hubspot", "pa" + "t-na1-" + "123e4567-e89b-12d3-a456-426614174000"),
                ("tailscale", "ts" + "key-auth-" + MIXED[:30]),
                ("tavily", "tvl" + "y-" + MIXED[:32]),
                ("contentful", "CF" + "PAT-" + MIXED[:43]),
                ("dynatrace", "dt0" + "c01." + UPPER[:24] + "." + UPPER),
                ("atlassian", "ATA" + "TT3" + MIXED),
                ("jfrog", "AK" + "Cp" + MIXED[:69]),
                ("bedrock", "AB" + "SK" + MIXED),
                ("fly", "fm" + "2_" + MIXED[:100]),
                ("vercel blob", "vercel" + "_blob_rw_" + MIXED[:16] + "_" + MIXED[:30]),
                ("bitbucket", "AT" + "BB" + MIXED[:32]),
                ("okta", "SS" + "WS 00" + MIXED[:40]),
                ("nuget", "oy" + "2" + MIXED[:43].lower()),
                ("crates", "ci" + "o" + MIXED[:32]),
                ("e2b", "e2" + "b_" + (HEX * 3)[:40]),
                ("modal", "a" + "k-" + MIXED[:22]),
                ("cerebras", "cs" + "k-" + MIXED[:48]),
                ("fireworks", "f" + "w_" + MIXED[:24]),
                ("confluent", "cf" + "lt" + MIXED[:60]),
                ("ngrok", "2" + MIXED[:26] + "_" + MIXED[:21]),
                ("intercom", "dG9" + "rO" + MIXED[:55]),
                ("elevenlabs", "s" + "k_" + HEX * 3),
            )
        ),
    )
}
HARMLESS = (
    "form.password=values;",
    "const token=readToken;",
    "ConvertTo-SecureString $env:PASSWORD -AsPlainText",
    "ConvertTo-SecureString -AsPlainText",
    "client-key: /etc/kubernetes/pki/apiserver.key",
    'session_key = ended[0]["session_key"]',
    r"C:\new\temp\ghost\password\readme.txt",
    "password: null",
    "token: string",
    '"password": "string"',
    "password=${DB_PASSWORD}",
    "token = $TOKEN",
    "password: <your password>",
    "secret: {{ vault.secret }}",
    "password=%s",
    "password: ********",
    "api_key=None",
    "def login(user: str, password: str, token: str | None = None) -> None:",
    "login(password=password, token=self.token)",
    "password = getpass.getpass()",
    "secret = secrets.token_hex(16)",
    "token = tokens[0]",
    "key = api_key(name)",
    "The token expired; ask for a new password.",
    "Bearer tokens are better than basic authentication.",
    '"max_tokens": 4096, "tokens": 71344, "token_count": 12',
    "eos_token: <|endoftext|>",
    'next_page_token: "CAUQAA1234"',
    "sha256:" + HEX * 4,
    "commit " + (HEX * 3)[:40],
    "art:3f9b2a1c8e4d#/items/0",
    '"token": "art:3f9b2a1c8e4d"',
    "123e4567-e89b-12d3-a456-426614174000",
    "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 8).decode(),
    "https://example.com:8080/a@b",
    "user@example.com wrote",
    "git@github.com:owner/name.git",
    "PWD=/home/anna/src",
    "class=sk-folding-cube-container-large",
    "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQC7 anna@host",
    "cache_key: user_17_page_3",
    armoured("PUBLIC" + " KEY"),
    armoured("CERTIFICATE"),
    "keyboard: a1b2c3d4",
    "secretary: anna.b.1977",
    "author: bob1977x",
    '["username", "password", "email"]',
    "session_id: fix-login-bug-17",
    "password_file=/run/secrets/db",
    "bypass=true1x",
    "tests pass: 34/40",
    "--- PASS: TestFoo2 (0.00s)",
    "PASS=12 FAIL=3",
    'first_pass="opt2"',
    "render_pass: shadow_map2",
    "compass=n42e17x",
    f"{ESC}[32mPASS{ESC}[0m src/a2.test.js",
    "password:\n  description: the password\n",
    "password:\n\nThe user must",
    "Enter password:\nWelcome back",
    "token:\n  type: string\n",
    "secret:\n  name: db-secret-2\n",
    "Password:\n- at least 8 characters",
    "password:\n  $ref: '#/definitions/Pw1'",
    "token: |\n  this is a long text about 3 tokens\n  and more\n",
    "password: >\n  Your new password has 8 characters\n",
    '"password": "Your password must have 8 characters"',
    '"password": "Mot de passe"',
    'password: "Min 8 chars, 1 digit."',
    "machine learning password protection",
    "login form password field",
    "https://first.last2024@example.org/",
    "git+https://oauth2@gitlab.example/a",
    "secret_access_key_id_of_the_bucket_in_region",
    "key-value-store-with-a-long-name-here",
    "www.abcdef.com-this-is-a-long-host-name-here",
    '"password": "Passwort vergessen?"',
    '"password": "Wachtwoord opnieuw instellen"',
    '"password": "contains letters and digits only"',
    "- password: |\n    the password of the user\n  user: bob\n",
    "secret: >\n  a name that is used\n  in the tests\n",
    "API key:\n\nSee the console",
    "API key:\n\n  - none\n",
    "machine learning models login via password managers",
    "ENV PASSWORD_FILE /run/secrets/db",
    "ENV DB_PASS $DB_PASS",
    "- name: DB_PASSWORD\n  valueFrom:\n    secretKeyRef: x2y3z4",
    "- name: LOG_LEVEL\n  value: debug2trace3\n",
    "- name: DB_PASSWORD\n  value: ${DB_PASSWORD}\n",
    '<add key="Theme" value="dark-mode-2024-large"/>',
    '<input type="text" name="username" value="bob1977xyz"/>',
    "psk=None",
    "if psk == wpa2_psk:",
    "mysql -u root -p mydb2",
    "mysql --port 3306 -P 3307",
    "docker login -p $TOKEN",
    "sshpass -p $PASS ssh host",
    "mkdir -p src/a1b2",
    "cost:$6$ per unit",
    "fw_update_state_machine_name",
    "as-a-service-2024-platform",
    "cioran2024",
    "2023_10_11_some_migration_name_here",
)


@pytest.mark.parametrize("name", CANARIES)
def test_a_secret_is_masked_and_the_text_around_it_stays(name: str) -> None:
    text, secret = CANARIES[name]
    masked = mask(text)
    assert secret not in masked
    assert MARK in masked
    start, end = text.index(secret), text.index(secret) + len(secret)
    assert masked.startswith(text[: start - 40 if start > 40 else 0])
    assert masked.endswith(text[end:])
    assert mask(masked) == masked


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_is_left_alone(text: str) -> None:
    assert mask(text) == text


ESCAPED = ("\n", "\t", "\r", "\b", "\f", '"', "\\", "é", "\U0001f600", "\x1b[31m")
"""Characters that JSON writes as an escape, and a colour."""


def in_json(text: str, depth: int) -> str:
    for _ in range(depth):
        text = json.dumps({"stdout": text})
    return text


@pytest.mark.parametrize("name", CANARIES)
def test_a_secret_in_a_json_string_is_masked_after_every_escape(name: str) -> None:
    text, secret = CANARIES[name]
    longest_line = max(re.split(r"\\n|\n", secret), key=len)
    for before, filler, depth in product(ESCAPED, ("", "served\n" * 100), (1, 2, 3)):
        if before == "\\" and ESC in text:
            continue  # a backslash before a written colour looks like an escape
        plain = f"{filler}first{before}{text}\nlast"
        if longest_line in mask(plain):
            continue  # such a character hides it in plain text too
        masked = mask(in_json(plain, depth))
        assert longest_line not in masked, (before, depth)
        assert mask(masked) == masked


def test_a_marker_does_not_reveal_how_long_the_secret_was() -> None:
    assert (
        mask("password=" + "Zx9horse")
        == mask("password=" + "Zx9horse" * 20)
        == "password=[masked: password]"
    )


@pytest.mark.parametrize("name", CANARIES)
def test_a_secret_is_masked_wherever_it_is_shown_and_exact_where_it_is_read(
    name: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    text, secret = CANARIES[name]
    session = store.session("s")
    values: list[Any] = [
        f"findable words {text} and more",
        f"{'x' * 150} findable {text}\n" + "a line of its own\n" * 1_000 + text,
        {"findable": text, "rows": [1, 2]},
        f"findable {text}".encode("utf-16"),
    ]
    refs = [session.put(value) for value in values]
    refs.append(session.put("content " + name, summary=f"findable {text}"[:500]))
    exported = io.BytesIO()
    store.export(exported)
    lines = [json.loads(line) for line in exported.getvalue().splitlines()]
    shown = {
        "summary": [ref.summary for ref in refs],
        "list": [repr(ref) + json.dumps(ref.to_record()) for ref in session.list()],
        "preview": [
            session.preview(ref, limit=limit).text for ref in refs for limit in (200, 2_000)
        ],
        "search": [hit.passage for hit in session.search("findable " + name)],
        "export": [json.dumps(line["ref"], ensure_ascii=False) for line in lines if "ref" in line],
        "log": [caplog.text],
    }
    needles = {
        secret,
        json.dumps(secret)[1:-1],
        *(line for line in secret.splitlines() if len(line) > 40),
    }
    for where, texts in shown.items():
        for each in texts:
            plain = each.replace("\x00", "")
            assert not [needle for needle in needles if needle in plain], (where, each)
    assert shown["search"]
    for ref, value in zip(refs, values, strict=False):
        assert session.get(ref) == value
    assert secret in session.read(refs[0]).text


def test_ls_and_show_mask_a_secret_and_get_prints_it_exactly(tmp_path: Path) -> None:
    text, secret = CANARIES["github"]
    file = tmp_path / "content.txt"
    file.write_text(text)
    where = ["--store", str(tmp_path / "store")]
    run = CliRunner()
    pointer = run.invoke(
        main, ["put", str(file), "--summary", f"with {secret}", *where]
    ).output.strip()
    for command in (["ls"], ["ls", "--json"], ["show", pointer], ["show", pointer, "--json"]):
        result = run.invoke(main, [*command, *where])
        assert result.exit_code == 0
        assert secret not in result.output
        assert MARK in result.output
    assert run.invoke(main, ["get", pointer, *where]).output == text


def test_a_hit_whose_passage_begins_inside_a_private_key_does_not_show_it(store: Store) -> None:
    lines = [f"line{number} " + MIXED[:40].replace("a", str(number % 10)) for number in range(90)]
    body = "\n".join(base64.b64encode(line.encode()).decode() for line in lines)
    session = store.session("s")
    session.put("some words\n" + armoured("RSA PRIVATE" + " KEY", body) + "\nother words\n")
    wanted = body.splitlines()[45]
    for hit in session.search(wanted):
        assert not [line for line in body.splitlines() if line in hit.passage]


def test_a_summary_that_cuts_a_secret_does_not_show_its_beginning(store: Store) -> None:
    _, secret = CANARIES["github"]
    for at in range(150, 205):
        summary = store.session("s").put("x" * at + " " + secret + " rest").summary
        assert secret[:8] not in summary


def test_a_long_summary_stays_within_its_limit_and_putting_it_again_adds_nothing(
    store: Store,
) -> None:
    session = store.session("s")
    summary = " ".join(f"password=Zx9!horse{number}" for number in range(30))[:500]
    first = session.put("content", summary=summary)
    assert len(first.summary) <= 500
    assert "Zx9" not in first.summary
    assert session.put("content", summary=summary) == first
    assert len(session.list(name=None)) == 1


def test_an_imported_summary_is_masked(backend: Backend) -> None:
    _, secret = CANARIES["github"]
    one, other = backend.open(), backend.open_new()
    one.session("s").put("content", summary="harmless words")
    exported = io.BytesIO()
    one.export(exported)
    other.import_(io.BytesIO(exported.getvalue().replace(b"harmless words", secret.encode())))
    assert [ref.summary for ref in other.session("s").list()] == ["[masked: github token]"]


@pytest.mark.parametrize("secret", ["minio", "postgres", "1", "not-a-secret", "a%40b", "token"])
def test_a_secret_in_a_url_is_recognized_by_its_position_whatever_it_looks_like(
    secret: str,
) -> None:
    key, catalog = f"{MARK} key]", "catalog=postgresql://u:{}@h:1/d?sslmode=require"
    url = f"s3://b/p?secret_access_key={secret}&session_token={secret}&region=r&{catalog.format(secret)}"
    masked = f"s3://b/p?secret_access_key={key}&session_token={key}&region=r&{catalog.format(f'{MARK} password]')}"
    assert mask_url(url) == mask_url(masked) == masked
    for plain in (
        "s3://b/p?region=r&catalog=postgresql://u@h:5432/d?a=b",
        "/home/me/a store",
        "memory:",
    ):
        assert mask_url(plain) == plain


def test_errors_do_not_quote_secrets() -> None:
    _, secret = CANARIES["github"]
    assert secret not in clip(f"no such thing: {secret}")
    assert secret[:12] not in clip("x" * 70 + " " + secret + "y" * 200)


def test_a_preview_says_that_secrets_are_masked() -> None:
    found = preview(Sample.of(b"user=bob\npassword=Zx9horseQq\n"), media_type="text/plain")
    assert found.text == "user=bob\npassword=[masked: password]\n"
    assert found.shown.endswith("; 1 secret in it, masked here")


def test_a_preview_of_a_part_says_that_there_may_be_more_secrets() -> None:
    text = "a line of words\n" * 30_000
    found = preview(Sample.of(f"password=Zx9horseQq\n{text}".encode()), media_type="text/plain")
    assert found.shown.endswith("; at least 1 secret in it, masked here")


@pytest.mark.parametrize("shift", range(-60, 61, 4))
def test_cutting_a_large_text_leaves_no_part_of_a_secret(shift: int) -> None:
    _, secret = CANARIES["openai"]
    fill = "words and more words\n" * 10_000
    at = EDGE + shift
    data = (fill[: at - 1] + " " + secret + "\n" + fill).encode()
    for place in (data, data[::-1].replace(secret[::-1].encode(), secret.encode())):
        shown = preview(Sample.of(place), media_type="text/plain", limit=4 * EDGE).text
        assert not [i for i in range(len(secret) - 8) if secret[i : i + 8] in shown]


def test_json_stays_valid_when_a_value_is_masked() -> None:
    found = preview(
        Sample.of(b'{"user": "bob", "password": "Zx9\\"horse", "rows": [1, 2, 3]}'),
        media_type="application/json",
    )
    assert json.loads(mask('{"user": "bob", "password": "Zx9\\"horse", "rows": [1, 2, 3]}'))[
        "rows"
    ] == [1, 2, 3]
    assert "horse" not in found.text


@pytest.mark.parametrize("cut", [slice(0, 300), slice(200, None), slice(40, None)])
def test_a_private_key_that_is_cut_off_is_masked_to_its_end(cut: slice) -> None:
    masked = mask(armoured("RSA PRIVATE" + " KEY")[cut])
    assert masked == "[masked: private key]"


def test_a_part_is_masked_by_the_text_around_it() -> None:
    text = 'password = "' + "correcthorse" + '"'
    assert mask(text, 15, 20) == "[masked: password]"
    assert mask(text, 0, 8) == "password"


def test_values_are_masked_by_their_keys_too() -> None:
    _, secret = CANARIES["github"]
    value = {
        "user": "bob",
        "dbPassword": "letmein",
        "Authorization": "Bearer " + MIXED[:30],
        "cookie": "sid=" + MIXED[:32],
        "nested": [
            {"API_KEY": "Zx9horseQq1", "max_tokens": 4096, "password": None},
            f"see {secret}",
            ("a", 1.5),
        ],
        secret: True,
        "token": ["Zx9horseQq1", "Zx9horseQq2"],
        "next_token": "CAUQAA1234",
    }
    masked = mask_value(value)
    assert masked == {
        "user": "bob",
        "dbPassword": "[masked: password]",
        "Authorization": "[masked: authorization]",
        "cookie": "sid=[masked: cookie]",
        "nested": [
            {"API_KEY": "[masked: key]", "max_tokens": 4096, "password": None},
            "see [masked: github token]",
            ["a", 1.5],
        ],
        "[masked: github token]": True,
        "token": ["[masked: token]", "[masked: token]"],
        "next_token": "CAUQAA1234",
    }
    assert mask_value(masked) == masked
    assert value["dbPassword"] == "letmein"


def test_several_secret_keys_are_all_kept() -> None:
    keys = [CANARIES["github"][1], CANARIES["github"][1] + "x", CANARIES["github"][1] + "y"]
    assert sorted(mask_value(dict.fromkeys(keys, 1)).values()) == [1, 1, 1]


def test_a_value_that_contains_itself_or_is_nested_deeper_than_the_stack_is_masked() -> None:
    deep: Any = "password=Zx9horseQq"
    for _ in range(100_000):
        deep = [deep]
    shown = mask_value(deep)
    while isinstance(shown, list):
        shown = shown[0]
    assert shown == "password=[masked: password]"
    loop: list[Any] = []
    loop.append(loop)
    again = mask_value(loop)
    assert again[0] is again


PARTS = (
    [text for text, _ in CANARIES.values()]
    + [secret for _, secret in CANARIES.values()]
    + list(HARMLESS)
    + [
        "password",
        "token",
        "=",
        ": ",
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "://",
        "@",
        ":",
        "-----BEGIN PRIVATE" + " KEY-----",
        "eyJ",
        "cookie:",
        "Authorization: ",
        "bearer ",
        "[masked: token]",
        MARK,
        "]",
        ",",
        ";",
        "é",
        "İ",
        "\ud800",
        "(",
        "--",
        "<",
        ">",
    ]
)


@given(
    st.one_of(
        st.text(),
        st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=5)), max_size=12).map("".join),
    )
)
def test_masking_never_fails_and_masking_again_changes_nothing(text: str) -> None:
    masked = mask(text)
    assert mask(masked) == masked
    assert len(masked) <= 4 * len(text) + 32
    assert find_secrets(masked) == []


@given(
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=5)), max_size=8).map("".join),
    st.data(),
)
def test_any_part_of_a_text_can_be_masked(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    masked = mask(text, start, end)
    # The text around a part may show that a word in it is not a secret; the rest of that word alone
    # may look like one.
    assert mask(masked) == masked or mask(text[start:end]) != masked


NEAR = (
    "token:",
    "token=",
    'token="',
    "password: ",
    "api_key=",
    "cookie: a=",
    "cookie: a=12345678;",
    "authorization: bearer ",
    "bearer ",
    "sig=",
    "-",
    "-----BEGIN ",
    "-----BEGIN PRIVATE" + " KEY-----\n",
    "AAAAAAAAAAAAAAAAAA\n",
    "eyJ",
    "eyJ-",
    "eyJaaaaaaaaaaa.",
    "gh" + "p_",
    "_a",
    "glpat-",
    "sk-",
    "sk-a-",
    "SG.aaaaaaaaaaaaaaaaaaaa.",
    "://",
    "://a:b",
    "@",
    "12345678:AA",
    "AKIA",
    "\\",
    '\\"',
    '"token","',
    "token: a | ",
    "--token ",
    "<token>",
    "curl -u a:",
    "aaaQ~",
    "token=[masked: token]",
    "=",
    "token=a.",
    "a.b",
    "hooks.slack.com/services/",
    "Private-Lines: 1\n",
    "\x1b[1m",
    "\\u001b[",
    "login a password ",
    "machine a password ",
    "password:\n",
    " token: |\n ",
    "DB_PASS=",
    ".aaaaaa.",
    "d" + "p.pt.",
    "://aaaaaaaaaaaaaaaa",
)


LEADS = ('token: "', "cookie: ", "-----BEGIN PRIVATE" + " KEY-----\n")


@pytest.mark.faults
@pytest.mark.timeout(120)
@pytest.mark.parametrize("piece", NEAR)
def test_a_long_text_of_near_secrets_is_masked_quickly(piece: str, long_faults: bool) -> None:
    leads = ("", *LEADS)
    for lead in leads if long_faults else [leads[NEAR.index(piece) % len(leads)]]:
        text = lead + piece * ((250_000 if long_faults else 100_000) // len(piece))
        assert len(mask(text)) <= 3 * len(text)


def test_real_data_is_left_alone(corpus: Path, long_faults: bool) -> None:
    most = None if long_faults else 200_000
    found = [
        span
        for file in sorted(corpus.rglob("*"))
        if file.suffix in (".json", ".jsonl", ".csv", ".html")
        for span in find_secrets(file.read_text(encoding="utf-8")[:most])
    ]
    assert {span.label for span in found} <= {
        "authorization",
        "password",
        "secret",
        "key",
        "signature",
    }
    assert len(found) <= 35  # example headers and secrets in documentation, each checked by hand


def test_our_own_source_has_nothing_to_mask() -> None:
    source = Path(coatcheck.__file__).parent
    for file in source.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert mask(text) == text, file


NEARLY = ["--token ", "Key", "to\u212aen = ", "sig=", "bearer", "\n"]


@given(
    st.lists(
        st.sampled_from([text for text, _ in CANARIES.values()] + NEARLY) | st.text(max_size=12),
        max_size=6,
    )
)
def test_a_text_that_the_prefilter_skips_contains_no_secret(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert is_suspect(text) or not found_without_prefilter(text)


def test_the_prefilter_skips_no_real_text_that_contains_a_secret(
    corpus: Path, long_faults: bool
) -> None:
    for path in sorted(corpus.rglob("*.json*")):
        text = path.read_text()[: 500_000 if long_faults else 100_000]
        for at in range(0, len(text), 8_192):
            piece = text[at : at + 8_192]
            assert is_suspect(piece) or not found_without_prefilter(piece)


def found_without_prefilter(text: str) -> list[Secret]:
    return [secret for rule in RULES for secret in rule.find(text)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.keyword)
def test_every_rule_fires_at_the_start_the_middle_and_the_end_of_a_text_of_1_mb(
    rule: Rule,
) -> None:
    filler = "2026-01-01 served 17 requests in 31 ms\n" * 13_000
    samples = [text for text, _ in CANARIES.values() if list(rule.find(text))]
    assert samples, "add a sample of this rule to CANARIES"
    sample = samples[0]
    for text in (f"{sample}\n{filler * 2}", f"{filler}{sample}\n{filler}", f"{filler * 2}{sample}"):
        places = {(secret.start, secret.end) for secret in rule.find(text)}
        found = find_secrets(text)
        assert places
        for start, end in places:
            assert any(one.start <= start and end <= one.end for one in found)


def test_values_beside_their_names_and_numbers_are_masked_too() -> None:
    value = {
        "env": [{"name": "DB_PASS", "value": "Zx9-horse"}, {"name": "PORT", "value": "5432"}],
        "password": 123456,
    }
    assert mask_value(value) == {
        "env": [
            {"name": "DB_PASS", "value": "[masked: password]"},
            {"name": "PORT", "value": "5432"},
        ],
        "password": "[masked: password]",
    }


@pytest.mark.parametrize("at", range(440, 500, 6))
def test_an_error_of_a_tool_is_masked_before_it_is_cut(store: Store, at: int) -> None:
    _, secret = CANARIES["github"]

    def fails() -> None:
        raise RuntimeError("x" * at + f" {secret} " + "y" * 20_000)

    session = store.session("s")
    outcome = ToolExecutor(session, [fails]).run(ToolCall("c", "fails", {}))
    assert isinstance(outcome, ToolError)
    shown = outcome.text + outcome.message + (str(session.get(outcome.ref)) if outcome.ref else "")
    assert secret[:8] not in shown


def test_an_error_of_a_query_is_masked_before_it_is_cut(store: Store) -> None:
    _, secret = CANARIES["github"]
    session = store.session("s")
    for size in range(500, 600, 12):
        ref = session.put(f"a,b\n{'x' * size} {secret},1\n2,3\n", media_type="text/csv")
        with pytest.raises(coatcheck.errors.InvalidArgument) as raised:
            session.read(ref, query="SELECT CAST(a AS INTEGER) FROM artifact")
        assert secret[:8] not in str(raised.value)
