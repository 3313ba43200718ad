"""Host state on disk: files, queues of reads and writes, staging buffers and read-ahead."""
