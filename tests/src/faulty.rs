//! Peers that misbehave. Each is honest until it is asked for a tensor's data.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a peer does when it is asked for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Does not answer.
    Silent,
    /// Sends a byte every 40 ms.
    Drips,
    /// Closes the connection after half of the bytes.
    Dies,
    /// Sends three bytes fewer than it says that they are.
    Short,
    /// Sends three bytes more.
    Long,
    /// Sends the bytes from four before those asked for on, and says so.
    OtherRange,
    /// Sends the whole file.
    IgnoresRange,
    /// Has another file of the same size by now.
    NewTag,
    /// Has a longer file by now.
    NewSize,
    /// Says that it is busy.
    Busy,
}

impl Fault {
    /// Every one.
    pub const ALL: [Self; 10] = [
        Self::Silent,
        Self::Drips,
        Self::Dies,
        Self::Short,
        Self::Long,
        Self::OtherRange,
        Self::IgnoresRange,
        Self::NewTag,
        Self::NewSize,
        Self::Busy,
    ];
}

/// A peer with a fault. Its threads end with their connections, the last with the process.
#[derive(Debug)]
pub struct FaultyPeer {
    address: SocketAddr,
}

impl FaultyPeer {
    /// Serves the files below `root`.
    ///
    /// # Panics
    /// Where loopback has no free port.
    pub fn serving(root: &Path, fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = listener.local_addr().expect("it is bound");
        let root = root.to_owned();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let root = root.clone();
                std::thread::spawn(move || serve(&stream, &root, fault));
            }
        });
        Self { address }
    }

    /// URL of the folder `id`.
    pub fn url(&self, id: &str) -> String {
        format!("http://{}/{id}", self.address)
    }
}

/// Answers requests of one connection until the client or a fault closes it.
fn serve(stream: &TcpStream, root: &Path, fault: Fault) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            match reader.read_line(&mut line) {
                Ok(bytes) if bytes > 0 => {}
                _ => return,
            }
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        let path = lines[0].split(' ').nth(1).unwrap_or_default().to_owned();
        let range = lines.iter().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            let (start, last) = value.strip_prefix("bytes=")?.split_once('-')?;
            let last: usize = last.parse().ok()?;
            name.eq_ignore_ascii_case("range")
                .then_some(start.parse().ok()?..last + 1)
        });
        let file = root.join(path.trim_start_matches('/'));
        if answer(stream, &file, range, fault).is_none() {
            return;
        }
    }
}

/// `None` where the connection is to be closed.
fn answer(
    stream: &TcpStream,
    file: &PathBuf,
    range: Option<Range<usize>>,
    fault: Fault,
) -> Option<()> {
    let Ok(bytes) = std::fs::read(file) else {
        return send(
            stream,
            "404 Not Found",
            &["Content-Length: 0".to_owned()],
            b"",
        );
    };
    let size = bytes.len();
    let Some(range) = range else {
        return send(
            stream,
            "200 OK",
            &[format!("Content-Length: {size}")],
            &bytes,
        );
    };
    let range = range.start..range.end.min(size);
    let header = 8 + u64::from_le_bytes(*bytes.first_chunk()?) as usize;
    if range.start >= header {
        return misbehave(stream, &bytes, range, fault);
    }
    let headers = partial(range.clone(), size, "first", range.len());
    send(stream, PARTIAL, &headers, &bytes[range])
}

const PARTIAL: &str = "206 Partial Content";

/// Headers that say: `length` bytes follow, which are `range` of a file of `size` bytes.
fn partial(range: Range<usize>, size: usize, tag: &str, length: usize) -> Vec<String> {
    let last = range.end - 1;
    vec![
        format!("Content-Range: bytes {}-{last}/{size}", range.start),
        format!("ETag: \"{tag}\""),
        format!("Content-Length: {length}"),
    ]
}

/// Answers a question for data. `None` where the connection is to be closed.
fn misbehave(
    mut stream: &TcpStream,
    bytes: &[u8],
    range: Range<usize>,
    fault: Fault,
) -> Option<()> {
    let (size, length) = (bytes.len(), range.len());
    let part = &bytes[range.clone()];
    let honest = partial(range.clone(), size, "first", length);
    match fault {
        Fault::Silent => {
            // Till the client has gone, or longer than any test waits.
            std::thread::sleep(Duration::from_secs(20));
            None
        }
        Fault::Drips => {
            send(stream, PARTIAL, &honest, b"")?;
            for byte in part {
                std::thread::sleep(Duration::from_millis(40));
                stream.write_all(&[*byte]).ok()?;
            }
            Some(())
        }
        Fault::Dies => {
            send(stream, PARTIAL, &honest, &part[..length / 2])?;
            None
        }
        Fault::Short => {
            let headers = partial(range, size, "first", length - 3);
            send(stream, PARTIAL, &headers, &part[..length - 3])
        }
        Fault::Long => {
            let headers = partial(range, size, "first", length + 3);
            send(stream, PARTIAL, &headers, &[part, b"???"].concat())
        }
        Fault::OtherRange => {
            let other = range.start - 4..range.end - 4;
            let headers = partial(other.clone(), size, "first", length);
            send(stream, PARTIAL, &headers, &bytes[other])
        }
        Fault::IgnoresRange => {
            let headers = [
                "ETag: \"first\"".to_owned(),
                format!("Content-Length: {size}"),
            ];
            send(stream, "200 OK", &headers, bytes)
        }
        Fault::NewTag => send(
            stream,
            PARTIAL,
            &partial(range, size, "second", length),
            part,
        ),
        Fault::NewSize => send(
            stream,
            PARTIAL,
            &partial(range, size + 8, "first", length),
            part,
        ),
        Fault::Busy => {
            let headers = ["Content-Length: 0".to_owned()];
            send(stream, "503 Service Unavailable", &headers, b"")
        }
    }
}

fn send(mut stream: &TcpStream, status: &str, headers: &[String], body: &[u8]) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\n{}\r\n\r\n", headers.join("\r\n"));
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body).ok()
}
