//! A peer that holds adapters: an HTTP server with ranges, on loopback.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tiny_http::{Header, Method, Request, Response, Server, StatusCode};

/// A request that was answered: the path, and the bytes sent of that file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// Path, with a slash before it.
    pub path: String,
    /// Bytes of the file.
    pub range: Range<usize>,
}

/// Serves a folder until it is dropped.
pub struct Peer {
    server: Arc<Server>,
    address: SocketAddr,
    sent: Arc<Mutex<Vec<Sent>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Peer {
    /// Serves the files below `root`, from four threads.
    ///
    /// # Panics
    /// Where loopback has no free port.
    pub fn serving(root: &Path) -> Self {
        let server = Arc::new(Server::http("127.0.0.1:0").expect("loopback has a free port"));
        let address = server.server_addr().to_ip().expect("an IP address");
        let sent = Arc::new(Mutex::new(Vec::new()));
        let threads = (0..4).map(|_| {
            let (server, sent, root) = (Arc::clone(&server), Arc::clone(&sent), root.to_owned());
            std::thread::spawn(move || {
                for request in server.incoming_requests() {
                    answer(request, &root, &sent);
                }
            })
        });
        let threads = threads.collect();
        Self {
            server,
            address,
            sent,
            threads,
        }
    }

    /// `127.0.0.1:port`.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// URL of the folder `id`.
    pub fn url(&self, id: &str) -> String {
        format!("http://{}/{id}", self.address)
    }

    /// What was sent so far, in no order.
    ///
    /// # Panics
    /// Where a thread of the server panicked.
    pub fn sent(&self) -> Vec<Sent> {
        self.sent.lock().expect("no thread panicked").clone()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        for _ in &self.threads {
            self.server.unblock();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn header(name: &str, value: &str) -> Header {
    Header::from_bytes(name, value).expect("a header")
}

fn answer(request: Request, root: &Path, sent: &Mutex<Vec<Sent>>) {
    let path = request.url().to_owned();
    let file: PathBuf = root.join(path.trim_start_matches('/'));
    let Ok(bytes) = std::fs::read(&file) else {
        let _ = request.respond(Response::empty(404));
        return;
    };
    let size = bytes.len();
    let asked = request
        .headers()
        .iter()
        .find(|header| header.field.equiv("Range"))
        .map(|header| parse_range(header.value.as_str(), size));
    let (status, range) = match asked {
        Some(range) if range.is_empty() => {
            let _ = request.respond(Response::empty(416));
            return;
        }
        Some(range) => (206, range),
        None => (200, 0..size),
    };
    let body = match request.method() {
        Method::Head => Vec::new(),
        _ => bytes[range.clone()].to_vec(),
    };
    let mut headers = vec![
        header("ETag", &format!("\"{size}\"")),
        header("Accept-Ranges", "bytes"),
    ];
    if status == 206 {
        let content = format!("bytes {}-{}/{size}", range.start, range.end - 1);
        headers.push(header("Content-Range", &content));
    }
    sent.lock()
        .expect("no thread panicked")
        .push(Sent { path, range });
    let length = Some(body.len());
    let response = Response::new(StatusCode(status), headers, &body[..], length, None);
    let _ = request.respond(response.with_chunked_threshold(usize::MAX));
}

/// `bytes=a-b`, cut at the end of the file.
fn parse_range(value: &str, size: usize) -> Range<usize> {
    let (start, last) = value
        .strip_prefix("bytes=")
        .and_then(|range| range.split_once('-'))
        .expect("one range");
    let start = start.parse().expect("a number");
    let end = last.parse().map_or(size, |last: usize| size.min(last + 1));
    start..end.max(start)
}
