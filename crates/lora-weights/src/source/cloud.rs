//! Stores of cloud providers, each behind a feature.

use super::SourceOptions;
use object_store::{ClientOptions, Error, ObjectStore, ObjectStoreScheme, Result, RetryConfig};
use std::sync::Arc;
use url::Url;

type Settings<'a> = (&'a SourceOptions, ClientOptions, RetryConfig);

/// The three builders are alike and share no trait.
#[cfg(any(feature = "aws", feature = "gcp", feature = "azure"))]
macro_rules! build {
    ($builder:ty, $url:expr, $settings:expr) => {{
        let (options, client, retry) = $settings;
        let builder = <$builder>::new()
            .with_url($url.to_string())
            .with_client_options(client)
            .with_retry(retry);
        let builder = options
            .settings
            .iter()
            .fold(builder, |builder, (key, value)| {
                // A setting of another store is not this one's.
                match key.to_ascii_lowercase().parse() {
                    Ok(key) => builder.with_config(key, value),
                    Err(_) => builder,
                }
            });
        Ok(Arc::new(builder.build()?) as _)
    }};
}

/// Opens a store whose feature is on.
pub(super) fn open(
    scheme: ObjectStoreScheme,
    url: &Url,
    settings: Settings<'_>,
) -> Result<Arc<dyn ObjectStore>> {
    let _ = (url, &settings);
    match scheme {
        #[cfg(feature = "aws")]
        ObjectStoreScheme::AmazonS3 => build!(object_store::aws::AmazonS3Builder, url, settings),
        #[cfg(feature = "gcp")]
        ObjectStoreScheme::GoogleCloudStorage => {
            build!(object_store::gcp::GoogleCloudStorageBuilder, url, settings)
        }
        #[cfg(feature = "azure")]
        ObjectStoreScheme::MicrosoftAzure => {
            build!(object_store::azure::MicrosoftAzureBuilder, url, settings)
        }
        other => Err(Error::NotSupported {
            source: format!(
                "built without the feature for {other:?}: there are aws, gcp and azure"
            )
            .into(),
        }),
    }
}
