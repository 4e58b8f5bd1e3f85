//! Which store a location is in.

use super::{SourceError, SourceOptions};
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig};
use std::sync::Arc;
use url::Url;

/// A store, and where in it a location is.
pub(super) struct Place {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) base: Path,
    /// The location as a URL without a slash at its end.
    pub(super) url: String,
}

/// Resolves `location`: a URL, or `host:port`, which is `http://host:port/`.
pub(super) fn resolve(location: &str, options: &SourceOptions) -> Result<Place, SourceError> {
    let url = parse(location)?;
    let shown = shown(&url);
    let (scheme, base) =
        ObjectStoreScheme::parse(&url).map_err(|error| SourceError::BadLocation {
            location: shown.clone(),
            detail: format!("{error}; file, http, https, s3, gs and az URLs name a store"),
        })?;
    let store = open(scheme, &url, options).map_err(|source| SourceError::Store {
        url: shown.clone(),
        source: Box::new(source),
    })?;
    Ok(Place {
        store,
        base,
        url: shown,
    })
}

fn parse(location: &str) -> Result<Url, SourceError> {
    let error = |detail: String| SourceError::BadLocation {
        location: location.to_owned(),
        detail,
    };
    let text = match location.contains("://") {
        true => location.to_owned(),
        false if is_host_and_port(location) => format!("http://{location}"),
        false => return Err(error("neither a URL nor host:port".to_owned())),
    };
    let url = Url::parse(&text).map_err(|e| error(e.to_string()))?;
    let has_user = !url.username().is_empty() && url.scheme().starts_with("http");
    if url.password().is_some() || has_user {
        let location = shown(&url);
        let detail =
            "a URL that carries a user or a password is not taken: it would stand in every log"
                .to_owned();
        return Err(SourceError::BadLocation { location, detail });
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(error(
            "a URL with a query or a fragment names one file; give the adapter's folder".to_owned(),
        ));
    }
    Ok(url)
}

/// `host:port`, a path behind it or not.
fn is_host_and_port(location: &str) -> bool {
    let authority = location.split('/').next().unwrap_or_default();
    authority
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// The URL for people: no user, no password, no slash at its end.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    if url.password().is_some() {
        // Both fail for URLs without a host only, which have neither.
        let _ = url.set_password(None);
        let _ = url.set_username("");
    }
    url.as_str().trim_end_matches('/').to_owned()
}

fn open(
    scheme: ObjectStoreScheme,
    url: &Url,
    options: &SourceOptions,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let retry = || RetryConfig {
        max_retries: options.retries,
        retry_timeout: options.timeout,
        ..RetryConfig::default()
    };
    // Time is kept by the reads themselves, over the whole of an answer; the client's own limit must not cut in before it.
    let client = || {
        ClientOptions::new()
            .with_allow_http(true)
            .with_connect_timeout(options.timeout)
            .with_timeout_disabled()
    };
    match scheme {
        ObjectStoreScheme::Local => Ok(Arc::new(object_store::local::LocalFileSystem::new())),
        ObjectStoreScheme::Memory => Ok(Arc::new(object_store::memory::InMemory::new())),
        ObjectStoreScheme::Http => {
            let store = object_store::http::HttpBuilder::new()
                .with_url(&url[..url::Position::BeforePath])
                .with_client_options(client())
                .with_retry(retry())
                .build()?;
            Ok(Arc::new(store))
        }
        other => super::cloud::open(other, url, (options, client(), retry())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(location: &str) -> Result<String, String> {
        parse(location)
            .map(|url| url.to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn host_and_port_is_plain_http() {
        assert_eq!(url("127.0.0.1:8000"), Ok("http://127.0.0.1:8000/".into()));
        assert_eq!(url("gpu-7:80/lora/a"), Ok("http://gpu-7/lora/a".into()));
        assert_eq!(url("[::1]:8000"), Ok("http://[::1]:8000/".into()));
        assert_eq!(url("https://host/a"), Ok("https://host/a".into()));
    }

    #[test]
    fn what_is_no_location_says_so() {
        for location in ["", "somewhere", "host:", ":80", "host:99999", "./a:b/c"] {
            let error = url(location).unwrap_err();
            assert_eq!(error, format!("{location}: neither a URL nor host:port"));
        }
        let place = resolve("ftp://host/a", &SourceOptions::default());
        let error = place.err().unwrap().to_string();
        assert!(error.starts_with("ftp://host/a: "), "{error}");
    }

    #[test]
    #[cfg(not(feature = "aws"))]
    fn a_store_that_is_not_built_in_names_its_feature() {
        let error = resolve("s3://bucket/a", &SourceOptions::default());
        let error = error.err().unwrap().to_string();
        assert!(
            error.starts_with("s3://bucket/a: ") && error.contains("aws, gcp and azure"),
            "{error}"
        );
    }

    #[test]
    fn passwords_are_refused_and_not_shown() {
        let error = url("http://me:secret@host/a").unwrap_err();
        assert!(error.starts_with("http://host/a: "), "{error}");
        assert!(!error.contains("secret"), "{error}");
        assert!(url("https://host/a?sig=1").unwrap_err().contains("query"));
    }
}
