"""The Deep Agents backend passes the tests of `langchain-tests` for sandboxes that the backends of
Deep Agents pass."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from deepagents.backends.protocol import ExecuteResponse, SandboxBackendProtocol
from langchain_tests.integration_tests import SandboxIntegrationTests

import coatcheck
from coatcheck.adapters.deepagents import Coatcheck

ROOT = Path("/tmp/test_sandbox_ops")  # the folder that the suite uses
ONE_AT_A_TIME = threading.Lock()


class WithShell(Coatcheck, SandboxBackendProtocol):
    """The backend with a shell beside it. The suite prepares and checks files with commands, so
    each command runs on a copy of the files on disk, and its changes go back into the backend."""

    @property
    def id(self) -> str:
        return "coatcheck"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        with ONE_AT_A_TIME:
            return self._execute(command, timeout)

    def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        shutil.rmtree(ROOT, ignore_errors=True)
        before = {
            one["path"]: self.download_files([one["path"]])[0].content
            for one in self.glob("**").matches or []
        }
        before = {name: content for name, content in before.items() if name.startswith(f"{ROOT}/")}
        ROOT.mkdir()
        for name, content in before.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content or b"")
        shell = ["/bin/sh", "-c", command]
        done = subprocess.run(
            shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
        )
        after = {str(path): path.read_bytes() for path in ROOT.rglob("*") if path.is_file()}
        self.upload_files(
            [(name, content) for name, content in after.items() if before.get(name) != content]
        )
        for name in before.keys() - after.keys():
            self.delete(name)
        return ExecuteResponse(
            output=done.stdout.decode(errors="replace"), exit_code=done.returncode
        )


@pytest.mark.asyncio
class TestCoatcheckSandbox(SandboxIntegrationTests):
    OUTDATED: ClassVar = {
        "test_read_binary_file_1_mib_returns_error": "only sandboxes that read through a shell have this limit",
        "test_aread_binary_file_1_mib_returns_error": "only sandboxes that read through a shell have this limit",
        "test_write_existing_file_fails": "write replaces a file since Deep Agents 0.7",
        "test_edit_multiple_occurrences_without_replace_all": "Deep Agents 0.7 words the error in another way",
        "test_ls_lists_nested_directories": "folders end with a slash in Deep Agents 0.7",
        "test_glob": "paths are absolute since Deep Agents 0.7",
        "test_glob_basic_pattern": "paths are absolute since Deep Agents 0.7",
        "test_glob_hidden_files_explicitly": "paths are absolute since Deep Agents 0.7",
        "test_glob_with_character_class": "paths are absolute since Deep Agents 0.7",
        "test_glob_with_question_mark": "paths are absolute since Deep Agents 0.7",
        "test_glob_with_directories": "glob finds only files since Deep Agents 0.7",
        "test_write_read_download_large_text_with_escaped_content": "reads keep the line end since Deep Agents 0.7",
        "test_aread_large_text_payload_paginated_roundtrip": "reads keep the line end since Deep Agents 0.7",
        "test_awrite_aread_adownload_large_text_with_escaped_content": "reads keep the line end since Deep Agents 0.7",
    }
    """Tests that the backends of Deep Agents 0.7 fail as well: the suite was written for an earlier
    version."""

    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[SandboxBackendProtocol]:
        with coatcheck.open("memory:") as store:
            yield WithShell(store)
        shutil.rmtree(ROOT, ignore_errors=True)
