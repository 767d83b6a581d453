"""What a child process gives up on Linux before it touches hostile content: `landlock` for files,
`seccomp` for system calls."""
