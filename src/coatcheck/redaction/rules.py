"""The table of rules: what is a secret, and how it is found.

A new kind of secret is one row here, and a sample of it in `tests/test_redaction.py`. The prefilter
of `coatcheck.redaction.engine` is made from the keywords of this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import names, places
from coatcheck.redaction.secret import Secret


@dataclass(frozen=True)
class Rule:
    """How one kind of secret is found."""

    label: str
    keyword: str
    """RE2 expression over UTF-8 that matches every text in which `find` finds something. It may
    match more; a text without it is not searched."""
    find: Callable[[str], Iterator[Secret]]


BASE64: Final = "0-9A-Za-z+/"  # so that no part of an image in base64 is taken for a key
_WORD: Final = "0-9A-Za-z"
_PUNCTUATED: Final = r"\w.+/-"
_BASE58: Final = "[1-9A-HJ-NP-Za-km-z]"
_AWS_SECRET: Final = r"(?:[\s,:;|\"']{1,6}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?"
_MIXED_CASE: Final = r"(?=\w{0,20}[a-z])(?=\w{0,20}[A-Z])(?=\w{0,20}[0-9])"
_LOOKAROUND: Final = re.compile(r"\(\?<?[=!][^()]*\)")
_MOST_REPEATS: Final = 16


def start(before: str) -> str:
    """RE2 expression for what comes before a token: the start of the text, a character other than
    these, or an escape of JSON."""
    return rf"(?:^|[^{before}]|\\[bfnrt]|\\u[0-9A-Fa-f]{{4}})"


def token(
    label: str, pattern: str, *, before: str = _WORD, after: str = "", keyword: str = ""
) -> Rule:
    """Rule for a token that has a shape of its own. `before` and `after` are the characters that
    may not come directly before and after it. Its keyword is its beginning unless one is given."""
    ending = f"(?![{after}])" if after else ""
    return shape(
        label,
        rf"(?<![{before}]){pattern}{ending}",
        keyword=keyword or start(before) + _beginning(pattern),
    )


def shape(label: str, pattern: str, *, keyword: str) -> Rule:
    """Rule for a secret that is the whole match of a pattern."""
    compiled = lazy_pattern(pattern, re.ASCII)

    def find(text: str) -> Iterator[Secret]:
        for match in compiled.finditer(text):
            yield Secret(*match.span(), label)

    return Rule(label, keyword, find)


def placed(literal: str, rest: str, *, keyword: str) -> Rule:
    """Rule for a value that follows a literal and the rest of what names it. The group `name` is
    its name, if the pattern has one; otherwise it is a password."""
    quoted = rf"{_QUOTE}([^\"'\n\\]{{1,256}}){_QUOTE}"
    value = rf"(?:{quoted}|([^\s\"'`\\,;|&<>]{{1,256}}))"
    compiled = lazy_pattern(rf"{literal}(?<![\w-]{literal}){rest}{value}", re.ASCII)

    def find(text: str) -> Iterator[Secret]:
        for match in compiled.finditer(text):
            group = match.lastindex or 0
            name = match.groupdict().get("name", "password")
            label = names.label_of(name, match[group])
            if label is not None:
                yield Secret(*match.span(group), label)

    return Rule("password", keyword, find)


def _beginning(pattern: str) -> str:
    """Return a pattern up to its first repetition, as an RE2 expression. Lookarounds are left out;
    a group that is cut is left out too."""
    plain = _LOOKAROUND.sub("", pattern)
    head, _, rest = plain.partition("{")
    if head.count("(") != head.count(")"):
        return plain.partition("(")[0]
    least = int(re.split("[,}]", rest)[0])
    return f"{head}{{{min(least, _MOST_REPEATS)}}}"


_QUOTE: Final = r"\\{0,4}[\"']"
_SPACE: Final = r"(?:\s|\\[nrt])+"
_NAME_AND_VALUE: Final = (
    rf"[ \t]{{1,8}}(?:{_QUOTE})?(?P<name>[\w.-]{{1,64}})(?:{_QUOTE})?[ \t]{{0,8}}"
    r"(?:\r?\n|(?:\\{1,4}r)?\\{1,4}n)[ \t]{0,40}value:[ \t]{1,8}"
)
_TAG_WITH_VALUE: Final = (
    r"(?:add|property|entry|param|setting)\s{1,8}(?:key|name)="
    rf"{_QUOTE}(?P<name>[\w.:-]{{1,64}}){_QUOTE}\s{{1,8}}value="
)
_IN_URL: Final = r"://[^\s/@]+@"

RULES: Final = (
    Rule("named secret", names.NAMED_KEYWORD, names.named_secrets),
    token("aws key", r"A[BKS]IA[A-Z2-7]{16}(?![0-9A-Za-z])" + _AWS_SECRET, before=BASE64),
    token("google key", r"AIza[\w-]{35}", before=BASE64),
    token("twilio key", r"SK[0-9a-f]{32}(?![0-9A-Za-z])", before=BASE64),
    token("github token", r"gh[oprsu]_[A-Za-z0-9]{20,}+"),
    token("github token", r"github_pat_\w{20,}+"),
    token("stripe key", r"[rs]k_(?:live|test|org)_[A-Za-z0-9]{10,}+"),
    token("webhook secret", r"whsec_[A-Za-z0-9+/=]{16,}+"),
    token("hugging face token", r"hf_[A-Za-z0-9]{20,}+"),
    token("npm token", r"npm_[A-Za-z0-9]{30,}+"),
    token("api key", r"gsk_[A-Za-z0-9]{30,}+"),
    token("docker token", r"dckr_[op]at_[\w-]{20,}+"),
    token("digitalocean token", r"do[opr]_v1_[0-9a-f]{32,}+"),
    token("shopify token", r"shp(?:at|ca|pa|ss)_[0-9A-Fa-f]{32,}+"),
    token("linear key", r"lin_(?:api|oauth)_[A-Za-z0-9]{32,}+"),
    token("notion token", r"ntn_[A-Za-z0-9]{40,}+"),
    token("figma token", r"fig[dour]_[\w-]{36,}+"),
    token("grafana token", r"glsa_[A-Za-z0-9]{32}_[0-9A-Fa-f]{8}"),
    token("grafana token", r"glc_[A-Za-z0-9+/=]{32,}+"),
    token("planetscale token", r"pscale_(?:tkn|oauth|pw)_[\w.=-]{30,}+"),
    token("supabase key", r"sbp_(?:v0_)?[0-9a-f]{40,}+"),
    token("supabase key", r"sb_secret_[\w-]{20,}+"),
    token("vercel token", r"vc[aikpr]_[A-Za-z0-9]{40,}+"),
    token("vercel token", r"vercel_blob_rw_\w{32,}+"),
    token("fly token", r"fm1[ar]_[A-Za-z0-9+/=]{50,}+"),
    token("fly token", r"fm2_[A-Za-z0-9+/=]{50,}+"),
    token("fly token", r"fo1_[\w-]{40,}+"),
    token("e2b key", r"e2b_[0-9a-f]{40}(?![0-9A-Za-z])"),
    token("fireworks key", r"fw_(?=[A-Za-z]{0,20}\d)(?=[^A-Z]{0,20}[A-Z])[A-Za-z0-9]{22,24}(?!\w)"),
    token("netlify token", r"nf[bcopu]_[A-Za-z0-9]{36,}+"),
    token("cloudflare token", r"cf[au]t_[A-Za-z0-9]{40,}+"),
    token("cloudflare key", r"cfk_[A-Za-z0-9]{40,}+"),
    token("sentry token", r"sntry[su]_[A-Za-z0-9+/=_-]{40,}+"),
    token("replicate token", r"r8_[A-Za-z0-9]{37,}+"),
    token("circleci token", r"CCI(?:PAT|PRJ)_[\w-]{30,}+"),
    token("buildkite token", r"bk[au]a_[0-9a-f]{40,}+"),
    token("rubygems key", r"rubygems_[0-9a-f]{48}"),
    token("sonar token", r"sq[aup]_[0-9a-f]{40}"),
    token("langsmith key", r"lsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{8,}+"),
    token("pinecone key", r"pcsk_\w{40,}+"),
    token("posthog key", r"phx_[A-Za-z0-9]{40,}+"),
    token("neon key", r"napi_[a-z0-9]{50,}+"),
    token("prefect key", r"pn[ub]_[A-Za-z0-9]{36}"),
    token("sourcegraph token", r"sgp_(?:[0-9a-f]{16}_|local_)?[0-9a-f]{40}"),
    token("api key", r"sk_[0-9a-f]{48}(?![0-9A-Za-z])"),
    token("mailgun key", r"key-[0-9a-f]{32}(?![0-9A-Za-z-])"),
    token("brevo key", r"xkeysib-[0-9a-f]{64}-[A-Za-z0-9]{16}"),
    token("brevo key", r"xsmtpsib-[0-9a-f]{64}-[A-Za-z0-9]{16}"),
    token("square token", r"sq0(?:at|cs)p-[\w-]{22,}+"),
    token("postman key", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}"),
    token("new relic key", r"NR(?:AK|II|RA|IQ|SP)-[\w-]{25,}+"),
    token("pulumi token", r"pul-[0-9a-f]{40}(?![0-9A-Za-z])"),
    token("heroku key", r"HRKU-[\w-]{36,}+"),
    token(
        "hubspot token", r"pat-(?:na|eu|ap)\d-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
    ),
    token("tailscale key", r"tskey-(?:auth|api|client|scim|webhook)-[\w-]{20,}+"),
    token("tavily key", r"tvly-(?=[\w-]{0,40}\d)[\w-]{24,}+"),
    token("contentful token", r"CFPAT-[\w-]{40,}+"),
    token("cloudflare key", r"v1\.0-[0-9a-f]{24}-[0-9a-f]{100,}+"),
    token("dynatrace token", r"dt0(?:c01|s16)\.[A-Z0-9]{24}\.[A-Z0-9]{64}"),
    token("dropbox token", r"sl\.(?:u\.)?[\w-]{100,}+"),
    token("gitlab token", r"gl(?:pat|ptt|cbt|imt)-[\w.-]{20,}+"),
    token("gitlab token", r"gl(?:dt|rt|ft|wt)-[\w.-]{20,}+"),
    token("gitlab token", r"gl(?:soat|ffct)-[\w.-]{20,}+"),
    token("gitlab token", r"glagent-[\w.-]{20,}+"),
    token("slack token", r"xox[abceoprs]-[\w-]{10,}+"),
    token("slack token", r"xapp-\d-[\w-]{10,}+"),
    token("api key", r"sk-(?=[\w-]{0,120}[A-Za-z0-9]{12})(?=[\w-]{0,120}\d)[\w-]{20,}+"),
    token(
        "modal key",
        r"a[ks]-(?=[A-Za-z]{0,20}\d)(?=[^A-Z]{0,20}[A-Z])[A-Za-z0-9]{22}(?![\w-])",
        before=r"0-9A-Za-z_-",
    ),
    token("api key", r"csk-[A-Za-z0-9]{40,}+"),
    token("api key", r"xai-[A-Za-z0-9]{30,}+"),
    token("api key", r"pplx-[A-Za-z0-9]{30,}+"),
    token("api key", r"nvapi-[\w-]{30,}+"),
    token("pypi token", r"pypi-[\w-]{32,}+"),
    token("google secret", r"GOCSPX-[\w-]{20,}+"),
    token("age key", r"AGE-SECRET-KEY-1[0-9A-Z]{20,}+"),
    token("google token", r"ya29\.[\w-]{20,}+"),
    token("vault token", r"hv[brs]\.[\w-]{20,}+"),
    token("sendgrid key", r"SG\.[\w-]{16,64}\.[\w-]{16,}+"),
    token("slack webhook", r"hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]{20,}+"),
    token("discord webhook", r"discord\.com/api/webhooks/\d{10,24}/[\w-]{20,}+"),
    token("discord webhook", r"discordapp\.com/api/webhooks/\d{10,24}/[\w-]{20,}+"),
    token("databricks token", r"dapi[0-9a-f]{32}(?:-[0-9])?", before=_PUNCTUATED, after=r"\w+/-"),
    token("notion token", r"secret_[A-Za-z0-9]{43}", before=_PUNCTUATED, after=r"\w+/-"),
    token(
        "terraform token",
        r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,}+",
        before=_PUNCTUATED,
        after=r"\w+/-",
        keyword=r"\.atlasv1\.",
    ),
    token(
        "doppler token",
        r"dp\.(?:[cp]t|sa|scim|audit|st(?:\.[\w-]{2,35})?)\.[A-Za-z0-9]{40,}+",
        before=_PUNCTUATED,
        after=r"\w+/-",
        keyword=r"dp\.(?:[cp]t|sa|scim|audit|st)\.",
    ),
    token(
        "airtable token", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}", before=_PUNCTUATED, after=r"\w+/-"
    ),
    token(
        "new relic key",
        r"[0-9a-f]{36}NRAL",
        before=_PUNCTUATED,
        after=r"\w+/-",
        keyword=r"[0-9a-f]NRAL",
    ),
    token(
        "mailchimp key",
        r"[0-9a-f]{32}-us[0-9]{1,2}",
        before=_PUNCTUATED,
        after=r"\w+/-",
        keyword=r"[0-9a-f]{8}-us[0-9]",
    ),
    token("square token", r"EAAA[\w-]{60}", before=_PUNCTUATED, after=r"\w+/-"),
    token("atlassian token", r"AT[AC]TT3[\w=-]{100,}+", before=_PUNCTUATED, after=r"\w+/-"),
    token("bitbucket password", r"ATBB[A-Za-z0-9]{32}", before=_PUNCTUATED, after=r"\w+/-"),
    token("okta token", r"SSWS 00[\w-]{40}", before=_PUNCTUATED, after=r"\w+/-"),
    token("nuget key", r"oy2[a-z0-9]{43}", before=_PUNCTUATED, after=r"\w+/-"),
    token(
        "crates token",
        r"cio(?=[A-Za-z]{0,20}\d)[A-Za-z0-9]{32}",
        before=_PUNCTUATED,
        after=r"\w+/-",
    ),
    token("confluent secret", r"cflt[A-Za-z0-9+/]{60}", before=_PUNCTUATED, after=r"\w+/-"),
    token(
        "ngrok token",
        r"2[A-Za-z0-9]{26}_[A-Za-z0-9]{21}",
        before=_PUNCTUATED,
        after=r"\w+/-",
        keyword=start(_WORD + "_") + "2[A-Za-z0-9]{26}_",
    ),
    token("intercom token", r"dG9rO[A-Za-z0-9+/]{40,}+=*+", before=_PUNCTUATED, after=r"\w+/-"),
    token("jfrog key", r"AKCp[A-Za-z0-9]{60,}+", before=_PUNCTUATED, after=r"\w+/-"),
    token("bedrock key", r"ABSK[A-Za-z0-9+/]{100,}+=*+", before=_PUNCTUATED, after=r"\w+/-"),
    token("gitlab token", r"GR1348941[\w-]{20,}+", before=_PUNCTUATED, after=r"\w+/-"),
    token(
        "discord token",
        r"[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}+",
        before=_PUNCTUATED,
        after=r"\w+/-",
        keyword=r"\.[\w-]{6}\.[\w-]{20}",
    ),
    token("jwt", r"eyJ[\w-]{10,}+(?:\.[\w-]*+){1,4}", before=r"\w-"),
    token("telegram token", r"\d{8,10}:AA[\w-]{30,}+", before=r"\w:", keyword=":AA"),
    shape(
        "telegram token",
        r"(?:(?<=telegram\.org/bot)|(?<=telegram\.org/file/bot))\d{6,12}:[\w-]{30,}+",
        keyword=r"telegram\.org[\\/]",
    ),
    shape(
        "bitcoin key",
        rf"(?<![{BASE64}])(?:5{_MIXED_CASE}{_BASE58}{{50}}|[KL]{_MIXED_CASE}{_BASE58}{{51}})"
        rf"(?![{BASE64}=])",
        keyword=f"{start(BASE64)}[5KL]{_BASE58}{{50}}",
    ),
    token("azure secret", r"[\w~.-]{3}\dQ~[\w~.-]{30,}+", before=r"\w~.-", keyword="Q~"),
    shape(
        "password hash",
        r"(?<=[\w.-]:)\$(?:apr1|[1567y]|2[abxy]|gy)\$[\w./$=,]{20,200}+",
        keyword=r":\$[0-9a-z]+\$",
    ),
    shape("password hash", r"(?<=[\w.-]:)\{SHA\}[A-Za-z0-9+/]{27}=", keyword=r":\{SHA\}"),
    placed("sshpass", r"[ \t]{1,4}-p[ \t]{0,4}", keyword=r"sshpass[ \t]"),
    placed(
        "docker",
        r"[ \t]{1,4}login(?=[ \t])[^\n|;&]{0,200}?[ \t]-p[ \t]{1,4}",
        keyword=r"docker[ \t]+login[ \t]",
    ),
    placed(
        "mysql",
        r"(?:dump|admin)?(?=[ \t])[^\n|;&]{0,200}?[ \t]-p(?=\S{0,64}\d)(?=\S{0,64}[A-Za-z])",
        keyword=r"mysql[a-z]*[ \t][^\n]*-p",
    ),
    placed(
        "psk",
        r"[ \t]{0,4}[=:][ \t]{0,4}(?=[^\n]{0,64}[0-9!@#$%^&*+~?])",
        keyword=r"psk[ \t]*[=:]",
    ),
    placed(
        "ENV",
        r"(?<![^\n]ENV)[ \t]{1,8}(?P<name>\w{1,64})[ \t]{1,8}",
        keyword=rf"(?:^|\n|\\n)ENV[ \t]+\w*(?i:{names.SECRET_WORDS}|pass)",
    ),
    placed(
        "ConvertTo-SecureString",
        r"[ \t]{1,4}(?:-String[ \t]{1,4})?(?![-$(])",
        keyword=r"ConvertTo-SecureString[ \t]",
    ),
    placed("name:", _NAME_AND_VALUE, keyword=names.NAME_THEN_VALUE),
    placed("<", _TAG_WITH_VALUE, keyword=names.NAME_THEN_VALUE),
    Rule(
        "password",
        rf"login{_SPACE}\S+{_SPACE}(?:account{_SPACE}\S+{_SPACE})?password[\s\\]"
        rf"|machine{_SPACE}\S+{_SPACE}password[\s\\]",
        places.netrc_passwords,
    ),
    Rule("private key", r"-----(?:BEGIN|END) [A-Z0-9 ]*PRIVATE KEY", places.private_keys),
    Rule("private key", "Private-Lines:", places.putty_keys),
    Rule("password", _IN_URL, places.url_passwords),
    Rule("password", "(?:-u|--user)[ =]", places.curl_passwords),
    Rule("token", _IN_URL, places.url_tokens),
)
"""Every kind of secret. Where two rules find the same place, the label is that of the first."""
